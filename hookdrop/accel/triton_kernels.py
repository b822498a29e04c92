"""DropBlock in two Triton kernels: `draw_kernel` draws packed masks, and `mask_kernel` applies them.

A mask holds one bit per element, in the format of `Blocks.packed`: each sample starts a new 32-bit word, and bit j of
its word i belongs to element 32 i + j of (channels, *sizes). `draw_kernel` works on whole words, and a shift by n bits
moves all maps by n elements. So small maps need no padding, and any block needs few steps.
"""

import triton
import triton.language as tl

SEED_BITS = tl.constexpr(31)
"""Each int64 of the state holds so many random bits; in a counter, the bits above count dropped elements."""
SEED_WORDS = tl.constexpr(2)
"""The length of the seed at the start of the state. The counters follow."""


@triton.jit(
    # One compiled kernel serves all shapes.
    do_not_specialize=[
        *("rate", "tiles", "words", "halo", "elements", "per_sample"),
        *("depth", "height", "width", "block_d", "block_h", "block_w"),
    ]
)
def draw_kernel(bits, state, rate: tl.int64, tiles, words, halo, elements,
                depth, height, width, block_d, block_h, block_w, per_sample,
                COUNT: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Draw the seeds of one tile of one sample, grow them to blocks, and write and count the bits.

    The first `halo` words of a tile are those before it: seeds there have blocks that reach into the tile. The random
    numbers depend on the position only, so neighboring tiles draw the same seeds.
    """
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lane = tl.arange(0, LANES)
    word = tile * (LANES - halo) - halo + lane
    fits = _fits(word, elements, depth, height, width, block_d, block_h, block_w)
    mask = _bernoulli(fits, word, sample, state, rate.to(tl.int64))
    mask = _dilated(mask, lane, block_w, 1)
    mask = _dilated(mask, lane, block_h, width)
    mask = _dilated(mask, lane, block_d, width * height)
    mine = (lane >= halo) & (word < words)
    tl.store(bits + sample.to(tl.int64) * words + word, mask.to(tl.int32, bitcast=True), mask=mine)
    if COUNT:
        count = tl.sum(tl.where(mine, _bit_count(mask), 0)).to(tl.int64)
        tl.atomic_add(state + SEED_WORDS + sample * per_sample, count << SEED_BITS, sem="relaxed")


@triton.jit
def _fits(word, elements, depth, height, width, block_d, block_h, block_w):
    """The bits of the positions where a whole block fits."""
    first = word * 32
    w, h, d = first % width, first // width % height, first // (width * height) % depth
    result = tl.zeros_like(word).to(tl.uint32)
    for bit in range(32):
        inside = (word >= 0) & (first + bit < elements)
        fit = inside & (w <= width - block_w) & (h <= height - block_h) & (d <= depth - block_d)
        result |= fit.to(tl.uint32) << bit
        w += 1
        h += (w == width).to(tl.int32)
        d += (h == height).to(tl.int32)
        w, h, d = tl.where(w == width, 0, w), tl.where(h == height, 0, h), tl.where(d == depth, 0, d)
    return result


@triton.jit
def _bernoulli(among, word, sample, state, rate):
    """The bits of `among` that succeed with probability `rate` / 2^64.

    Each position compares a random number with the rate, from the highest bit on, and is open until the two differ. The
    first 16 bits decide almost all, and 64 bits are used if needed.
    """
    seed = tl.load(state) | (tl.load(state + 1) << SEED_BITS)
    result, undecided = tl.zeros_like(among), among
    step = 0
    while (step < 16) & (tl.max((undecided != 0).to(tl.int32), axis=0) > 0):
        zeros = tl.zeros_like(word)
        r0, r1, r2, r3 = tl.philox(seed, word, zeros + sample, zeros + step, zeros)
        result, undecided = _compare(result, undecided, r0, rate, 63 - 4 * step)
        result, undecided = _compare(result, undecided, r1, rate, 62 - 4 * step)
        result, undecided = _compare(result, undecided, r2, rate, 61 - 4 * step)
        result, undecided = _compare(result, undecided, r3, rate, 60 - 4 * step)
        step += 1
    return result | undecided


@triton.jit
def _compare(result, undecided, random, rate, bit):
    """Compare one bit of the random numbers of 32 positions with one bit of the rate. Below the rate is a success."""
    of_rate = (0 - ((rate >> bit) & 1)).to(tl.uint32)
    # a & ~b is a ^ (a & b): Triton's interpreter cannot invert unsigned numbers with NumPy 2.
    below = undecided & of_rate
    return result | (below ^ (below & random)), undecided ^ (undecided & (random ^ of_rate))


@triton.jit
def _dilated(mask, lane, block, stride):
    """Extend each bit by `block` - 1 steps of `stride` bits. Each pass doubles the extent, as in `Blocks.dilated`."""
    covered = 1
    while covered < block:
        step = tl.minimum(covered, block - covered)
        mask |= _shifted(mask, lane, step * stride)
        covered += step
    return mask


@triton.jit
def _shifted(mask, lane, by):
    """Move all bits to positions that are higher by `by`."""
    source, rest = lane - by // 32, (by % 32).to(tl.uint32)
    high = tl.where(source >= 0, tl.gather(mask, tl.maximum(source, 0), 0), 0)
    low = tl.where(source > 0, tl.gather(mask, tl.maximum(source - 1, 0), 0), 0)
    # In two steps, because a shift by 32 is undefined.
    return (high << rest) | ((low >> 1) >> (31 - rest))


@triton.jit
def _bit_count(x):
    """The number of ones in each uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["count", "tiles", "words", "bit_stride", "per_sample"])
def mask_kernel(y, x, bits, state, scale, count: tl.int64, tiles, words,
                groups, length, sample_stride, group_stride, stride, bit_stride, per_sample,
                COUNTED: tl.constexpr, ALIGNED: tl.constexpr, GROUPS_FASTEST: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Write `x * scale`, and 0 where a bit is set.

    A sample consists of `groups` x `length` elements, in memory `group_stride` and `stride` apart; in the mask, groups
    are `bit_stride` bits apart. A row is a run of 32 elements of a group. If `GROUPS_FASTEST`, the next row is the next
    group, because groups are the fastest axis in memory.
    """
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    runs = (length + 31) // 32
    if GROUPS_FASTEST:
        group, start = row % groups, row // groups * 32
    else:
        group, start = row // runs, row % runs * 32
    first = group * bit_stride + start
    word, known = first // 32, row < groups * runs
    words_of_sample = bits + sample.to(tl.int64) * words
    dropped = tl.load(words_of_sample + word, mask=known, other=0).to(tl.uint32, bitcast=True)
    if not ALIGNED:
        following = tl.load(words_of_sample + word + 1, mask=known & (word + 1 < words), other=0)
        rest = (first % 32).to(tl.uint32)
        dropped = (dropped >> rest) | ((following.to(tl.uint32, bitcast=True) << 1) << (31 - rest))
    if COUNTED:
        # The scale that keeps the mean.
        lost = tl.load(state + SEED_WORDS + sample * per_sample) >> SEED_BITS
        scale = tl.div_rn(count.to(tl.float32), tl.maximum(count - lost, 1).to(tl.float32))
    bit = tl.arange(0, 32)[None, :]
    along = start[:, None] + bit
    offset = sample.to(tl.int64) * sample_stride + group[:, None] * group_stride + along * stride
    here = known[:, None] & (along < length)
    values = tl.load(x + offset, mask=here, other=0.0).to(tl.float32) * scale
    kept = ((dropped[:, None] >> bit.to(tl.uint32)) & 1) == 0
    tl.store(y + offset, tl.where(kept, values, 0.0), mask=here)
