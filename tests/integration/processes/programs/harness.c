/* Random geometries for the loops in hookdrop/accel/_blocks.c, which is SOURCE: run under sanitizers by ../test_processes.py. */
#include SOURCE
#include <stdio.h>

static uint64_t state = 1;
static int64_t below(int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)(state >> 33) % bound;
}

int main(void) {
    for (int round = 0; round < 3000; round++) {
        int64_t samples = 1 + below(3), channels = 1 + below(3), threads = 1 + below(5);
        int64_t kind = round % 2 ? 4 : 8, shared = below(2), odds = 1 + below(20);
        int64_t sizes[3] = {1 + below(3), 1 + below(6), 1 + below(round % 5 ? 9 : 150)}, edges[3], valid[3];
        for (int axis = 0; axis < 3; axis++) {
            edges[axis] = 1 + below(sizes[axis]);
            valid[axis] = sizes[axis] - edges[axis] + 1;
        }
        int64_t size = sizes[0] * sizes[1] * sizes[2], places = valid[0] * valid[1] * valid[2];
        int64_t masks = samples * (shared ? 1 : channels), maps = samples * channels, count = 0;
        char *x = calloc(maps * size, kind), *y = malloc(maps * size * kind);
        int64_t *seeds = malloc(masks * places * sizeof *seeds), *counts = calloc(samples, sizeof *counts);
        double *scales = calloc(samples, sizeof *scales);
        for (int64_t place = 0; place < masks * places; place++)
            if (below(odds) == 0)
                seeds[count++] = place;
        seeds = realloc(seeds, (count + 1) * sizeof *seeds); /* one more, which must not be read */
        seeds[count] = -1;
        int64_t first_valid[4] = {1, valid[0], valid[1], valid[2]}, first_edges[4] = {1, edges[0], edges[1], edges[2]};
        int64_t first_steps[4] = {0, sizes[1] * sizes[2], sizes[2], 1};
        hookdrop_mask(y, x, kind, scales, channels, maps, size, shared ? channels : 1, seeds, count, 1, places,
                      first_valid, first_steps, first_edges, first_steps, threads);
        int64_t own = shared ? 1 : channels;
        int64_t last_valid[4] = {own, valid[0], valid[1], valid[2]};
        int64_t last_edges[4] = {edges[0], edges[1], edges[2], shared ? channels : 1};
        int64_t corners[4] = {1, sizes[1] * sizes[2] * channels, sizes[2] * channels, channels};
        int64_t last_steps[4] = {sizes[1] * sizes[2] * channels, sizes[2] * channels, channels, 1};
        hookdrop_mask(y, round % 3 ? x : NULL, kind, scales, 1, samples, size * channels, 1, seeds, count, 1,
                      places * own, last_valid, corners, last_edges, last_steps, threads);
        hookdrop_count(counts, masks, own, seeds, count, 1, places, valid, sizes, edges, threads);
        for (int64_t sample = 0; sample < samples; sample++)
            if (counts[sample] < 0 || counts[sample] > own * size)
                return printf("%lld of %lld\\n", (long long)counts[sample], (long long)(own * size)), 1;
        int64_t pitch = own * size + below(3);
        uint8_t *dropped = calloc(samples * pitch, 1);
        hookdrop_clear(y, x, kind, scales, channels * size, samples, channels, size, dropped, pitch, shared, threads);
        free(x), free(y), free(seeds), free(counts), free(scales), free(dropped);
    }
    return 0;
}
