// y = x @ weight.T in bfloat16 with float32 sums, on tiles. Knows nothing of the columns' meaning.
//
// The weight lies as [out / 32][in / 32][2][16][16][2]: for 32 columns of the output and 32 of the input two tiles of
// 16 pairs, in the order in which they are read, so that a step of few rows is one stream through memory. Every sum
// runs over the input in the same order for any number of rows: a row's bits do not depend on its neighbours.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "pairs.h"
#include "pool.h"

namespace ponder {
namespace {

constexpr int64_t kAhead = 2048;            // bytes that a stream of weights is prefetched ahead
constexpr int64_t kRowsInCache = 1536 << 10;  // bytes of packed rows that stay in a core's second cache

inline Floats sigmoid(Floats x) {
  return div(splat(1.0f), add(splat(1.0f), exp2_16(mul(x, splat(-1.4426950408889634f)))));
}

inline Floats activate(Output kind, Floats x) {
  if (kind == Output::kGatedSilu) return mul(x, sigmoid(x));
  if (kind == Output::kGatedGeluTanh) {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
    const Floats inner = fmadd(mul(mul(x, x), x), splat(0.044715f), x);
    return mul(x, sigmoid(mul(inner, splat(1.5957691216057308f))));
  }
  alignas(64) float values[16];
  store(values, x);
  for (float& v : values) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
  return load(values);
}

struct Work {
  const bf16* packed;
  int64_t tokens, blocks, steps;  // blocks of 32 output columns; steps of 32 input columns
  const Weight& weight;
  const Destination& to;
};

#ifdef __AMX_TILE__

inline void prefetch(const bf16* tile) {
  const char* at = reinterpret_cast<const char*>(tile) + kAhead;
  for (int line = 0; line < 32; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T0);
}

// Up to 16 tokens: four accumulators over two blocks of columns, two streams of weights.
void few(const Work& work, int64_t first, int64_t last) {
  const int rows = static_cast<int>(work.tokens);
  const int64_t panel = work.steps * 1024;
  const bf16* weight = static_cast<const bf16*>(work.weight.tiles);
  alignas(64) float sums[2][16 * 32];
  for (int64_t block = first; block < last; block += 2) {
    const bf16 *one = weight + block * panel, *two = one + panel;
    const bool both = block + 1 < last;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < work.steps; ++step) {
      _tile_loadd(4, work.packed + step * kTileElements, 64);
      _tile_loadd(5, one + step * 1024, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, one + step * 1024 + 512, 64);
      _tile_dpbf16ps(1, 4, 6);
      prefetch(one + step * 1024);
      if (!both) continue;
      _tile_loadd(7, two + step * 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, two + step * 1024 + 512, 64);
      _tile_dpbf16ps(3, 4, 5);
      prefetch(two + step * 1024);
    }
    _tile_stored(0, sums[0], 128);
    _tile_stored(1, sums[0] + 16, 128);
    put(sums[0], rows, 0, block, work.weight, work.to, false);
    if (!both) continue;
    _tile_stored(2, sums[1], 128);
    _tile_stored(3, sums[1] + 16, 128);
    put(sums[1], rows, 0, block + 1, work.weight, work.to, false);
  }
}

// One block of columns for the tokens from `from` to `to`: 32 tokens at a time.
void block_of(const Work& work, int64_t block, int64_t from, int64_t to, int& configured) {
  const bf16* panel = static_cast<const bf16*>(work.weight.tiles) + block * work.steps * 1024;
  const int64_t tile_row = work.steps * kTileElements;
  alignas(64) float sums[32 * 32];
  for (int64_t token = from; token < to; token += 32) {
    const int upper = static_cast<int>(std::min<int64_t>(16, to - token));
    const int lower = static_cast<int>(std::clamp<int64_t>(to - token - 16, 0, 16));
    if (configured != upper * 32 + lower) {
      const int low = lower ? lower : 16;
      configure_tiles({upper, upper, low, low, upper, low, 16, 16});
      configured = upper * 32 + lower;
    }
    const bf16* one = work.packed + token / 16 * tile_row;
    const bf16* two = lower ? one + tile_row : one;
    const bool first = token == from;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < work.steps; ++step) {
      const bf16* tile = panel + step * 1024;
      _tile_loadd(6, tile, 64);
      _tile_loadd(4, one + step * kTileElements, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, tile + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, two + step * kTileElements, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      if (first) prefetch(tile);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (lower) {
      _tile_stored(2, sums + 512, 128);
      _tile_stored(3, sums + 528, 128);
    }
    put(sums, upper + lower, token, block, work.weight, work.to, work.tokens > 16);
  }
}

// Blocks [first, last) of columns for the tokens from `from` to `to`.
void many(const Work& work, int64_t first, int64_t last, int64_t from, int64_t to, int& configured) {
  for (int64_t block = first; block < last; ++block) block_of(work, block, from, to, configured);
}

#else

// Half a tile of rows at a time against as many blocks of columns as leave the accumulators in registers.
template <int kBlocks>
void halves(const Work& work, int64_t block, int64_t from, int64_t to) {
  const bf16* panel = static_cast<const bf16*>(work.weight.tiles) + block * work.steps * 1024;
  alignas(64) float sums[kBlocks][kPairRows * 32];
  for (int64_t token = from; token < to; token += kPairRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kPairRows, to - token));
    multiply_pairs<kBlocks>(work.packed + packed_at(token, work.steps, 0), rows, panel, work.steps, sums[0]);
    for (int i = 0; i < kBlocks; ++i) put(sums[i], rows, token, block + i, work.weight, work.to, work.tokens > 16);
  }
}

// Up to 16 tokens: a step waits for the weights, which for one or two of them come in four streams.
void few(const Work& work, int64_t first, int64_t last) {
  int64_t block = first;
#ifdef __AVX512F__
  if (work.tokens <= 2)
    for (; block + 4 <= last; block += 4) halves<4>(work, block, 0, work.tokens);
#endif
  for (; block < last; ++block) halves<1>(work, block, 0, work.tokens);
}

#ifdef __AVX512F__

void many(const Work& work, int64_t first, int64_t last, int64_t from, int64_t to, int&) {
  for (int64_t block = first; block < last; ++block) halves<1>(work, block, from, to);
}

#else

// A few groups of tokens at a time are widened, for all blocks, and stay in a core's second cache.
void many(const Work& work, int64_t first, int64_t last, int64_t from, int64_t to, int&) {
  constexpr int64_t kGroups = 4;
  static thread_local std::vector<float> wide;
  const int64_t group_size = work.steps * 32 * kWideRows;
  if (static_cast<int64_t>(wide.size()) < kGroups * group_size) wide.resize(kGroups * group_size);
  alignas(64) float sums[kGroups][kWideRows * 32];
  for (int64_t begin = from; begin < to; begin += kGroups * kWideRows) {
    const int64_t count = std::min(kGroups * kWideRows, to - begin), groups = (count + kWideRows - 1) / kWideRows;
    const auto start = [&](int64_t group) { return count * group / groups; };
    const auto rows = [&](int64_t group) { return static_cast<int>(start(group + 1) - start(group)); };
    for (int64_t group = 0; group < groups; ++group)
      for (int row = 0; row < rows(group); ++row)
        for (int64_t column = 0; column < work.steps * 32; column += 16)
          store(wide.data() + group * group_size + column * kWideRows + row * 16,
                load16(work.packed + packed_at(begin + start(group) + row, work.steps, column)));
    for (int64_t block = first; block < last; ++block) {
      const bf16* panel = static_cast<const bf16*>(work.weight.tiles) + block * work.steps * 1024;
      std::memset(sums, 0, sizeof sums);
      for (int64_t step = 0; step < work.steps; step += kWideSteps)
        for (int64_t group = 0; group < groups; ++group)
          multiply_wide(wide.data() + group * group_size + step * 32 * kWideRows, rows(group), panel + step * 1024,
                        std::min(kWideSteps, work.steps - step), sums[group]);
      for (int64_t group = 0; group < groups; ++group)
        put(sums[group], rows(group), begin + start(group), block, work.weight, work.to, true);
    }
  }
}

#endif
#endif

// Adds the updates of one token to its sums; `row` is room for its (in,) activations. Each sum is made of the token alone.
void update(const bf16* packed, int64_t token, int64_t steps, const Updates& updates, float* sums, float* row) {
  for (int64_t step = 0; step < steps; ++step) {
    const bf16* at = packed + packed_at(token, steps, step * 32);
    store(row + step * 32, load16(at));
    store(row + step * 32 + 16, load16(at + 16));
  }
  float middle[kMaxRank];
  for (int64_t part = 0; part < updates.count; ++part) {
    const LowRank& low = updates.parts[part];
    for (int64_t r = 0; r < low.rank; ++r) {
      const bf16* a = low.a + r * steps * 32;
      Floats one = zeros(), two = zeros();
      for (int64_t column = 0; column < steps * 32; column += 32) {
        one = fmadd(load16(a + column), load(row + column), one);
        two = fmadd(load16(a + column + 16), load(row + column + 16), two);
      }
      middle[r] = sum_of(add(one, two));
    }
    for (int64_t block = 0; block < low.blocks; ++block) {
      const bf16* b = low.b + block * low.rank * 32;
      float* at = sums + low.first + block * 32;
      Floats one = load(at), two = load(at + 16);
      for (int64_t r = 0; r < low.rank; ++r) {
        one = fmadd(load16(b + r * 32), splat(middle[r]), one);
        two = fmadd(load16(b + r * 32 + 16), splat(middle[r]), two);
      }
      store(at, one);
      store(at + 16, two);
    }
  }
}

}  // namespace

void put(const float* sums, int rows, int64_t token, int64_t block, const Weight& weight, const Destination& to,
         bool past_cache) {
  const int64_t column = block * 32;
  const int columns = static_cast<int>(std::min<int64_t>(32, weight.out - column));
  alignas(64) float bias[32] = {};
  if (weight.bias) std::memcpy(bias, weight.bias + column, columns * sizeof(float));
  for (int row = 0; row < rows; ++row) {
    const Floats low = add(load(sums + row * 32), load(bias)), high = add(load(sums + row * 32 + 16), load(bias + 16));
    switch (to.kind) {
      case Output::kRows: {
        bf16* at = static_cast<bf16*>(to.data) + (token + row) * to.stride + column;
        if (columns < 32) {
          bf16 whole[32];
          store32(whole, low, high);
          std::memcpy(at, whole, columns * sizeof(bf16));
        } else if (past_cache && reinterpret_cast<uintptr_t>(at) % 64 == 0) {
          stream32(at, low, high);
        } else {
          store32(at, low, high);
        }
        break;
      }
      case Output::kAdd: {
        bf16* at = static_cast<bf16*>(to.data) + (token + row) * to.stride + column;
        const Floats multiplier = splat(to.multiplier);
        store16(at, fmadd(low, multiplier, load16(at)));
        store16(at + 16, fmadd(high, multiplier, load16(at + 16)));
        break;
      }
      case Output::kFloats: {
        float* at = static_cast<float*>(to.data) + (token + row) * to.stride + column;
        float whole[32];
        float* here = columns < 32 ? whole : at;
        store(here, low);
        store(here + 16, high);
        if (columns < 32) std::memcpy(at, whole, columns * sizeof(float));
        break;
      }
      default:
        store16(static_cast<bf16*>(to.data) + packed_at(token + row, to.stride, block * 16),
                mul(activate(to.kind, low), high));
    }
  }
}

int64_t packed_bytes(int64_t out, int64_t in) { return (out + 31) / 32 * 32 * in * 2; }

void pack_weight(const bf16* weight, int64_t out, int64_t in, bf16* tiles) {
  for (int64_t row = 0; row < (out + 31) / 32 * 32; ++row)
    for (int64_t column = 0; column < in; column += 32) {
      bf16* tile = tiles + (row / 32 * (in / 32) + column / 32) * 1024 + row % 32 / 16 * 512 + row % 16 * 2;
      for (int pair = 0; pair < 16; ++pair)
        if (row < out)
          std::memcpy(tile + pair * 32, weight + row * in + column + pair * 2, 4);
        else
          std::memset(tile + pair * 32, 0, 4);
    }
}

void linear(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads) {
  if (weight.group) {
    linear_grouped(packed, tokens, weight, to, threads);
    return;
  }
#ifdef __AMX_TILE__
  if (weight.scales) {
    linear_int8(packed, tokens, weight, to, threads);
    return;
  }
#endif
  const Work work{packed, tokens, (weight.out + 31) / 32, weight.in / 32, weight, to};
  std::atomic<int64_t> next{0};
  if (tokens <= 16) {
    const int64_t share = std::clamp<int64_t>(work.blocks / (threads * 8) / 4 * 4, 4, 16);
    pool().run(threads, [&](int) {
#ifdef __AMX_TILE__
      const int rows = static_cast<int>(tokens);
      configure_tiles({rows, rows, rows, rows, rows, 16, 16, 16});
#endif
      before_tiles();
      for (int64_t first; (first = next.fetch_add(share)) < work.blocks;)
        few(work, first, std::min(first + share, work.blocks));
      release_tiles();
    });
    return;
  }
  // As many tokens at a time as stay in the cache while the weights stream past them.
  int64_t chunk = std::max<int64_t>(32, kRowsInCache / (weight.in * 2) / 32 * 32);
  if (chunk < tokens) chunk = ((tokens + (tokens + chunk - 1) / chunk - 1) / ((tokens + chunk - 1) / chunk) + 31) / 32 * 32;
  const int64_t all = (tokens + chunk - 1) / chunk * work.blocks;
  const int64_t share = std::clamp<int64_t>(work.blocks / (threads * 8), 1, 16);  // blocks that lie one after the other
  pool().run(threads, [&](int) {
    int configured = -1;
    before_tiles();
    for (int64_t first; (first = next.fetch_add(share)) < all;)
      for (int64_t index = first, last = std::min(first + share, all); index < last;) {
        const int64_t from = index / work.blocks * chunk, block = index % work.blocks;
        const int64_t blocks = std::min(last - index, work.blocks - block);
        many(work, block, block + blocks, from, std::min(from + chunk, tokens), configured);
        index += blocks;
      }
    release_tiles();
    finish_streams();
  });
}

void linear_adapted(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to,
                    const Adapted& adapted, int threads) {
  bool any = false;
  for (int64_t token = 0; token < tokens && !any; ++token)
    any = adapted.tokens[token] >= 0 && adapted.of[adapted.tokens[token] * adapted.stride].count > 0;
  if (!any) {
    linear(packed, tokens, weight, to, threads);
    return;
  }
  const int64_t blocks = (weight.out + 31) / 32, steps = weight.in / 32;
  linear(packed, tokens, weight, {Output::kFloats, adapted.sums, blocks * 32, 1.0f}, threads);
  Weight bare = weight;
  bare.bias = nullptr;  // the sums have it
  std::atomic<int64_t> next{0};
  pool().run(threads, [&](int) {
    std::vector<float> row(weight.in);
    for (int64_t token; (token = next.fetch_add(1)) < tokens;) {
      float* sums = adapted.sums + token * blocks * 32;
      if (adapted.tokens[token] >= 0)
        update(packed, token, steps, adapted.of[adapted.tokens[token] * adapted.stride], sums, row.data());
      for (int64_t block = 0; block < blocks; ++block) put(sums + block * 32, 1, token, block, bare, to, false);
    }
  });
}

}  // namespace ponder
