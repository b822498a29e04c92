/* Loops over blocks for which PyTorch has no one-pass operation. They are optional: hookdrop/kernels/native.py decides
   when to use them, and the modules that call it do the same without them. Nothing here is random. Seeds are sorted
   and may repeat. If they were not sorted, some would be skipped, but nothing would be written outside of a chunk. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

/* Use wider vectors if the processor supports them, which glibc detects when it loads the library. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define AXES 4

/* Number of elements that are scaled, and then cleared while they are in the cache. */
#define BATCH 4096

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Increment when a signature below changes; native.py checks it. */
EXPORT int64_t hookdrop_interface(void) { return 4; }

/* Request huge pages for memory that was just allocated: a page fault for each 4 KiB of a new result costs more than
   computing it. PyTorch does the same for all memory if THP_MEM_ALLOC_ENABLE=1. */
EXPORT void hookdrop_advise(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)1 << 21;
    uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1), end = ((uintptr_t)memory + bytes) & ~(page - 1);
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

/* Write the 0-based positions of the successes among `trials` trials: the gaps between them are ceil(logs / divisor).
   Returns their number, or -1 if the gaps end before the trials. */
EXPORT int64_t hookdrop_successes(void *at, int64_t wide, const double *logs, int64_t count, double divisor,
                                  int64_t trials) {
    int64_t end = 0;
    for (int64_t k = 0; k < count; k++) {
        double gap = logs[k] / divisor;
        if (!(gap <= (double)trials)) /* also infinity */
            return k;
        int64_t whole = (int64_t)gap;
        end += whole + ((double)whole < gap);
        if (end > trials)
            return k;
        if (wide)
            ((int64_t *)at)[k] = end - 1;
        else
            ((int32_t *)at)[k] = (int32_t)(end - 1);
    }
    return -1;
}

/* Seeds are int64_t, or int32_t where that is sufficient. */
typedef struct {
    const void *at;
    int64_t count, wide;
} Seeds;

static int64_t seed_at(Seeds seeds, int64_t k) {
    return seeds.wide ? ((const int64_t *)seeds.at)[k] : ((const int32_t *)seeds.at)[k];
}

static int64_t first_from(Seeds seeds, int64_t bound) {
    int64_t low = 0, count = seeds.count;
    while (low < count) {
        int64_t middle = low + (count - low) / 2;
        if (seed_at(seeds, middle) < bound)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

static int64_t offset_of(int64_t seed, const int64_t *valid, const int64_t *strides) {
    uint32_t rest = (uint32_t)seed;
    int64_t offset = 0;
    for (int axis = AXES - 1; axis > 0; axis--) {
        uint32_t next = rest / (uint32_t)valid[axis];
        offset += (int64_t)(rest - next * (uint32_t)valid[axis]) * strides[axis];
        rest = next;
    }
    return offset + (int64_t)rest * strides[0];
}

static void zero_run(char *at, int64_t bytes) {
    if (bytes >= 16) {
        for (int64_t done = 0; done + 16 <= bytes; done += 16)
            memset(at + done, 0, 16);
        memset(at + bytes - 16, 0, 16);
    } else if (bytes >= 8) {
        memset(at, 0, 8);
        memset(at + bytes - 8, 0, 8);
    } else if (bytes >= 4) {
        memset(at, 0, 4);
        memset(at + bytes - 4, 0, 4);
    } else {
        memset(at, 0, 2);
    }
}

/* The last axis is contiguous, or has length 1. */
static void zero_block(char *at, int64_t item, const int64_t *edges, const int64_t *strides) {
    for (int64_t a = 0; a < edges[0]; a++)
        for (int64_t b = 0; b < edges[1]; b++)
            for (int64_t c = 0; c < edges[2]; c++)
                zero_run(at + item * (a * strides[0] + b * strides[1] + c * strides[2]), item * edges[3]);
}

WIDE static void scale_float(float *y, const float *x, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        y[i] = x[i] * scale;
}

WIDE static void scale_double(double *y, const double *x, double scale, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        y[i] = x[i] * scale;
}

/* Zero the blocks of seeds `low` to `high` - 1, whose numbers start at `first`. */
static void zero_blocks(char *at, Seeds seeds, int64_t low, int64_t high, int64_t first, int64_t item,
                        const int64_t *valid, const int64_t *strides, const int64_t *edges, const int64_t *steps) {
    for (int64_t k = low; k < high; k++)
        if (seed_at(seeds, k) >= first)
            zero_block(at + item * offset_of(seed_at(seeds, k) - first, valid, strides), item, edges, steps);
}

/* Clear all bits, so that NaN and Inf also become 0. */
WIDE static void keep_float(float *y, const float *x, float scale, const uint32_t *kept, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits;
        } result = {x[i] * scale};
        result.bits &= kept[i];
        y[i] = result.value;
    }
}

WIDE static void keep_double(double *y, const double *x, double scale, const uint64_t *kept, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        union {
            double value;
            uint64_t bits;
        } result = {x[i] * scale};
        result.bits &= kept[i];
        y[i] = result.value;
    }
}

/* Clear all bits, so that NaN and Inf also become 0. */
WIDE static void clear_float(uint32_t *y, const uint8_t *dropped, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        y[i] &= (uint32_t)dropped[i] - 1;
}

WIDE static void clear_double(uint64_t *y, const uint8_t *dropped, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        y[i] &= (uint64_t)dropped[i] - 1;
}

/* y = x * scale, with zeros in the blocks.

   Memory is divided into `chunks` of `size` elements. `repeat` consecutive chunks share the seeds of one group, whose
   blocks have `edges` with strides `steps`. `per_scale` consecutive chunks share one scale. x may equal y; it is NULL if
   y is already scaled. `kind` is 4 for float and 8 for double; if x is NULL it is the size of an element. */
EXPORT void hookdrop_mask(char *y, const char *x, int64_t kind, const double *scales, int64_t per_scale, int64_t chunks,
                          int64_t size, int64_t repeat, const void *at, int64_t count, int64_t wide, int64_t places,
                          const int64_t *valid, const int64_t *strides, const int64_t *edges, const int64_t *steps,
                          int64_t threads) {
    const Seeds seeds = {at, count, wide};
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int64_t part = 0; part < threads; part++) {
        int64_t begin = chunks * part / threads, end = chunks * (part + 1) / threads;
        int64_t group = -1, low = 0, high = 0;
        /* Process short chunks together, with as many copies of a mask that they share. */
        int64_t together = size < BATCH ? BATCH / size : 1;
        if (together > repeat && repeat > 1)
            together = repeat;
        char *kept = x && repeat > 1 ? malloc(together * size * kind) : NULL;
        for (int64_t chunk = begin, run; chunk < end; chunk += run) {
            run = least(least(together, end - chunk), per_scale - chunk % per_scale);
            if (repeat > 1)
                run = least(run, repeat - chunk % repeat);
            char *to = y + chunk * size * kind;
            const char *from = x ? x + chunk * size * kind : NULL;
            double scale = x ? scales[chunk / per_scale] : 1.0;
            if (!kept && x && kind == 4)
                scale_float((float *)to, (const float *)from, (float)scale, run * size);
            else if (!kept && x)
                scale_double((double *)to, (const double *)from, scale, run * size);
            for (int64_t k = 0; k < run; k++) {
                int64_t now = (chunk + k) / repeat;
                if (now != group) {
                    low = group < 0 ? first_from(seeds, now * places) : high;
                    group = now;
                    for (high = low; high < count && seed_at(seeds, high) < (group + 1) * places; high++)
                        ;
                    if (kept) {
                        memset(kept, 0xff, size * kind);
                        zero_blocks(kept, seeds, low, high, group * places, kind, valid, strides, edges, steps);
                        for (int64_t copy = 1; copy < together; copy++)
                            memcpy(kept + copy * size * kind, kept, size * kind);
                    }
                }
                if (!kept)
                    zero_blocks(to + k * size * kind, seeds, low, high, group * places, kind, valid, strides, edges,
                                steps);
            }
            if (kept && kind == 4)
                keep_float((float *)to, (const float *)from, (float)scale, (const uint32_t *)kept, run * size);
            else if (kept)
                keep_double((double *)to, (const double *)from, scale, (const uint64_t *)kept, run * size);
        }
        free(kept);
    }
}

/* y = x * scale, with zeros where `dropped` (one byte per element) is 1.

   A sample has `channels` maps of `size` elements. Its mask bytes start `pitch` bytes after those of the previous
   sample, and cover only one map if `shared`. `per_scale` consecutive elements share one scale. */
EXPORT void hookdrop_clear(char *y, const char *x, int64_t kind, const double *scales, int64_t per_scale,
                           int64_t samples, int64_t channels, int64_t size, const uint8_t *dropped, int64_t pitch,
                           int64_t shared, int64_t threads) {
    int64_t elements = samples * channels * size;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int64_t part = 0; part < threads; part++) {
        int64_t end = elements / threads * (part + 1) + (part + 1 == threads ? elements % threads : 0);
        for (int64_t at = elements / threads * part, length; at < end; at += length) {
            int64_t map = at / size, inside = at % size;
            length = least(least(size - inside, end - at), least(BATCH, per_scale - at % per_scale));
            const uint8_t *bytes = dropped + map / channels * pitch + (shared ? 0 : map % channels * size) + inside;
            double scale = scales[at / per_scale];
            if (kind == 4) {
                scale_float((float *)y + at, (const float *)x + at, (float)scale, length);
                clear_float((uint32_t *)y + at, bytes, length);
            } else {
                scale_double((double *)y + at, (const double *)x + at, scale, length);
                clear_double((uint64_t *)y + at, bytes, length);
            }
        }
    }
}

/* Set bits [start, start + length) of a row, and return how many of them were not set before. */
static int64_t mark(uint64_t *row, int64_t start, int64_t length) {
    int64_t fresh = 0;
    while (length > 0) {
        int64_t bit = start % 64, here = length < 64 - bit ? length : 64 - bit;
        uint64_t bits = (here == 64 ? ~(uint64_t)0 : (((uint64_t)1 << here) - 1)) << bit;
        uint64_t added = bits & ~row[start / 64];
        row[start / 64] |= bits;
        fresh += added == bits ? here : __builtin_popcountll(added);
        start += here;
        length -= here;
    }
    return fresh;
}

/* Return how many elements of one map the blocks of its seeds cover. `rows` is zero before and after. */
static int64_t cover(uint64_t *rows, int64_t words, Seeds seeds, int64_t low, int64_t high, int64_t first,
                     const int64_t *valid, const int64_t *sizes, const int64_t *edges) {
    if (low == high)
        return 0;
    if (high - low == 1 && seed_at(seeds, low) >= first)
        return edges[0] * edges[1] * edges[2];
    int64_t covered = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t k = low; k < high; k++) {
            int64_t seed = seed_at(seeds, k) - first, line = seed / valid[2];
            if (seed < 0)
                continue;
            int64_t at[3] = {line / valid[1], line % valid[1], seed % valid[2]};
            for (int64_t d = at[0]; d < at[0] + edges[0]; d++)
                for (int64_t h = at[1]; h < at[1] + edges[1]; h++) {
                    uint64_t *row = rows + (d * sizes[1] + h) * words;
                    if (pass == 0)
                        covered += mark(row, at[2], edges[2]);
                    else if (words == 1)
                        *row = 0;
                    else
                        memset(row, 0, words * sizeof *row);
                }
        }
    return covered;
}

/* Return how many elements the blocks cover, or -1 if out of memory. Add the count of each sample to `counts`, unless it
   is NULL.

   A map has sizes[0] * sizes[1] rows of sizes[2], and `places` valid seed positions, `valid` along each axis. */
EXPORT int64_t hookdrop_count(int64_t *counts, int64_t maps, int64_t per_sample, const void *at, int64_t count,
                              int64_t wide, int64_t places, const int64_t *valid, const int64_t *sizes, const int64_t *edges,
                              int64_t threads) {
    const Seeds seeds = {at, count, wide};
    int64_t words = (sizes[2] + 63) / 64, failed = 0, total = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : failed, total)
    for (int64_t part = 0; part < threads; part++) {
        int64_t begin = maps * part / threads, end = maps * (part + 1) / threads;
        uint64_t *rows = calloc(sizes[0] * sizes[1] * words, sizeof *rows);
        if (!rows) {
            failed++;
            continue;
        }
        int64_t high = first_from(seeds, begin * places), covered = 0;
        for (int64_t map = begin; map < end; map++) {
            int64_t low = high;
            while (high < count && seed_at(seeds, high) < (map + 1) * places)
                high++;
            covered += cover(rows, words, seeds, low, high, map * places, valid, sizes, edges);
            if ((map + 1) % per_sample == 0 || map + 1 == end) {
                if (counts) {
#pragma omp atomic
                    counts[map / per_sample] += covered;
                }
                total += covered;
                covered = 0;
            }
        }
        free(rows);
    }
    return failed ? -1 : total;
}
