// y = x @ weight.T with weights of 8 or 4 bits whose scales are for groups of columns, by products of bytes (VNNI, or
// AVX2's in three instructions). Knows nothing of how the weights were rounded.
//
// A weight lies as blocks of 32 outputs, each one stream: for each group of columns 32 scales, 32 minimums where it has
// them (float16, parts of the row's own scale), then its codes, 16 columns at a time: four lines of 16 outputs by 4
// columns for either half of the block, two lines at 4 bits, of which each holds one in the low halves of its bytes and
// the next in the high ones. Nothing is prefetched: processors do so by themselves where addresses follow each other.
//
// Activations are rounded to 8 bits with a scale for each token's group. A group's products are summed as integers, the
// groups in their order as float32: a token's bits do not depend on its neighbours, nor on the processor.
#include <algorithm>
#include <atomic>
#include <vector>

#include "linear.h"
#include "pool.h"

namespace ponder {
namespace {

constexpr int64_t kTokensInCache = 768 << 10;  // bytes of rounded activations that stay in a core's second cache
// Rows that are multiplied together at most: their sums stay in registers.
constexpr int max_rows(int64_t bits) {
#ifdef __AVX512F__
  return bits == 8 ? 8 : 4;
#else
  return 2;
#endif
}

// Activations of 8 bits, a token's `stride` bytes apart, and for each of its groups three numbers.
struct Rounded {
  int8_t* bytes;
  int32_t* starts;  // what a sum of products begins with, so that code `zero` stands for 0
  float *scales, *sums;  // of a step, and of the group's values
  int64_t stride, groups;
};

struct Work {
  const Rounded& x;
  int64_t tokens, group_bytes, block_bytes;
  const Weight& weight;
  const Destination& to;
};

void round_token(const bf16* packed, int64_t token, const Weight& weight, const Rounded& to) {
  const int64_t width = weight.in, group = weight.group;
  const int32_t zero = weight.bits == 8 ? weight.zero - kCodeOffset : weight.zero;
  int8_t* bytes = to.bytes + token * to.stride;
  for (int64_t index = 0; index < to.groups; ++index) {
    const int64_t first = index * group;
    Floats top = zeros();
    for (int64_t at = first; at < first + group; at += 16)
      top = max(top, absolute(load16(packed + packed_at(token, width / 32, at))));
    const float largest = max_of(top);
    const Floats inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
    Ints total = zero_ints();
    for (int64_t at = first; at < first + group; at += 16) {
      const Ints whole = to_ints(mul(load16(packed + packed_at(token, width / 32, at)), inverse));
      total = add_ints(total, whole);
      store_bytes(bytes + at, whole);
    }
    const int64_t place = token * to.groups + index;
    const int32_t sum = sum_of(total);
    to.starts[place] = -zero * sum;
    to.scales[place] = largest / 127.0f;
    to.sums[place] = largest / 127.0f * static_cast<float>(sum);
  }
}

inline Ints four_bytes(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return splat_int(four);
}

template <int kBits, int kRows, int kVectors>
inline void multiply_line(Ints (&all)[kRows][kVectors], const Ints (&codes)[kVectors], const int8_t* x, int64_t stride) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const Ints four = four_bytes(x + row * stride);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      all[row][v] = kBits == 8 ? dot_bytes(all[row][v], codes[v], four) : dot_nibbles(all[row][v], codes[v], four);
  }
}

// kRows tokens times one block: sums[kRows][32].
template <int kBits, int kRows, bool kMinimums>
void multiply(const Work& work, int64_t token, int64_t block, float* to) {
  constexpr int kVectors = 2;
  const Rounded& x = work.x;
  const char* base = static_cast<const char*>(work.weight.tiles) + block * work.block_bytes;
  const int8_t* bytes = x.bytes + token * x.stride;
  const int64_t place = token * x.groups, units = work.weight.group / 16;
  Floats sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) sums[row][v] = zeros();
  for (int64_t group = 0; group < x.groups; ++group) {
    const char* scales = base + group * work.group_bytes;
    const char* codes = scales + (kMinimums ? 128 : 64);
    Ints all[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) all[row][v] = splat_int(x.starts[place + row * x.groups + group]);
    for (int64_t unit = 0; unit < units; ++unit) {
      const int8_t* at = bytes + group * work.weight.group + unit * 16;
#pragma GCC unroll 4
      for (int line = 0; line < kBits / 2; ++line) {  // of 8 bits: four; of 4 bits: two double ones
        Ints low[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          low[v] = load_ints(codes + ((unit * (kBits / 2) + line) * 2 + v) * 64);
        }
        if constexpr (kBits == 8) {
          multiply_line<8>(all, low, at + line * 4, x.stride);
        } else {
          const Ints mask = splat_int(0x0f0f0f0f);
          Ints high[kVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            high[v] = and_ints(shift_right_4(low[v]), mask);
            low[v] = and_ints(low[v], mask);
          }
          multiply_line<4>(all, low, at + line * 8, x.stride);
          multiply_line<4>(all, high, at + line * 8 + 4, x.stride);
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const char* of = scales + v * 32;
      const Floats step = load_half(of);
      const Floats minimum = kMinimums ? load_half(of + 64) : zeros();
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const int64_t here = place + row * x.groups + group;
        sums[row][v] = fmadd(mul(to_floats(all[row][v]), splat(x.scales[here])), step, sums[row][v]);
        if constexpr (kMinimums) sums[row][v] = fmadd(minimum, splat(x.sums[here]), sums[row][v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const Floats scale = load(work.weight.scales + block * 32 + v * 16);
    for (int row = 0; row < kRows; ++row) store(to + row * 32 + v * 16, mul(sums[row][v], scale));
  }
}

template <int kBits, bool kMinimums>
void multiply_rows_of(const Work& work, int rows, int64_t token, int64_t block, float* to) {
  if (rows == 1) return multiply<kBits, 1, kMinimums>(work, token, block, to);
  if (rows == 2) return multiply<kBits, 2, kMinimums>(work, token, block, to);
#ifdef __AVX512F__
  if (rows == 3) return multiply<kBits, 3, kMinimums>(work, token, block, to);
  if (rows == 4) return multiply<kBits, 4, kMinimums>(work, token, block, to);
  if constexpr (kBits == 8) {
    if (rows == 5) return multiply<8, 5, kMinimums>(work, token, block, to);
    if (rows == 6) return multiply<8, 6, kMinimums>(work, token, block, to);
    if (rows == 7) return multiply<8, 7, kMinimums>(work, token, block, to);
    multiply<8, 8, kMinimums>(work, token, block, to);
  }
#endif
}

// Tokens [from, to) of one block of outputs.
template <int kBits>
void block_of(const Work& work, int64_t block, int64_t from, int64_t to) {
  constexpr int kMaxRows = max_rows(kBits);
  alignas(64) float sums[kMaxRows * 32];
  for (int64_t token = from; token < to; token += kMaxRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kMaxRows, to - token));
    if (work.weight.minimums)
      multiply_rows_of<kBits, true>(work, rows, token, block, sums);
    else
      multiply_rows_of<kBits, false>(work, rows, token, block, sums);
    put(sums, rows, token, block, work.weight, work.to, work.tokens > 16);
  }
}

// What one thread reuses from call to call.
struct Room {
  std::vector<int8_t> bytes;
  std::vector<int32_t> starts;
  std::vector<float> scales;

  Rounded reserve(int64_t tokens, const Weight& weight) {
    const int64_t stride = weight.in + 64, groups = weight.in / weight.group;  // rows a power of two apart share sets
    const auto grow = [](auto& part, int64_t size) {
      if (static_cast<int64_t>(part.size()) < size) part.resize(size);
    };
    grow(bytes, tokens * stride);
    grow(starts, tokens * groups);
    grow(scales, 2 * tokens * groups);
    return {bytes.data(), starts.data(), scales.data(), scales.data() + tokens * groups, stride, groups};
  }
};

}  // namespace

void linear_grouped(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads) {
  static thread_local Room room;
  const Rounded x = room.reserve(tokens, weight);
  const auto round = [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) round_token(packed, token, weight, x);
  };
  if (tokens * weight.in <= 1 << 14)
    round(0, tokens);
  else
    pool().run(threads, [&](int thread) { round(tokens * thread / threads, tokens * (thread + 1) / threads); });

  const int64_t group_bytes = (weight.minimums ? 128 : 64) + weight.group * weight.bits * 4;
  const Work work{x, tokens, group_bytes, group_bytes * x.groups, weight, to};
  const int64_t blocks = (weight.out + 31) / 32;
  int64_t chunk = std::max<int64_t>(16, kTokensInCache / x.stride);
  chunk = (tokens + (tokens + chunk - 1) / chunk - 1) / ((tokens + chunk - 1) / chunk);
  chunk = (chunk + 7) / 8 * 8;
  const int64_t all = (tokens + chunk - 1) / chunk * blocks;
  const int64_t share = std::clamp<int64_t>(blocks / (threads * 8), 1, 16);  // blocks that lie one after the other
  std::atomic<int64_t> next{0};
  pool().run(threads, [&](int) {
    for (int64_t first; (first = next.fetch_add(share)) < all;)
      for (int64_t index = first; index < std::min(first + share, all); ++index) {
        const int64_t from = index / blocks * chunk;
        (weight.bits == 8 ? block_of<8> : block_of<4>)(work, index % blocks, from, std::min(from + chunk, tokens));
      }
    finish_streams();
  });
}

}  // namespace ponder
