// y = x @ weight.T with weights of 8 bits, on AMX tiles. Knows nothing of how the weights were rounded.
//
// Few tokens keep 16 bits: a value is 256 times a high byte plus a low one, and the two are rows of the same integer
// product, which costs nothing while the step waits for memory. Many tokens are rounded to 8 bits, which halves the
// arithmetic. Sums are integers, and so exact. Weights lie as [out / 32][in / 64][2][16][16][4].
#ifdef __AMX_TILE__
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "linear.h"
#include "pool.h"

namespace ponder {
namespace {

constexpr int64_t kAhead = 2048;
constexpr int kTileBytes = 1024;

inline void prefetch(const int8_t* tile) {
  const char* at = reinterpret_cast<const char*>(tile) + kAhead;
  for (int line = 0; line < 32; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T0);
}

// One token of packed rows to bytes in tiles of 16 by 64; `low` is null for 8 bits. Returns the scale.
float round_token(const bf16* packed, int64_t token, int64_t width, int8_t* high, int8_t* low) {
  __m512 top = _mm512_setzero_ps();
  for (int64_t at = 0; at < width; at += 16)
    top = _mm512_max_ps(top, _mm512_abs_ps(load16(packed + packed_at(token, width / 32, at))));
  const float largest = _mm512_reduce_max_ps(top), most = low ? 32512.0f : 127.0f;
  const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? most / largest : 0.0f);
  for (int64_t at = 0; at < width; at += 16) {
    const __m512 x = load16(packed + packed_at(token, width / 32, at));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
    const int64_t to = (token / 16 * (width / 64) + at / 64) * kTileBytes + token % 16 * 64 + at % 64;
    if (!low) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + to), _mm512_cvtepi32_epi8(whole));
      continue;
    }
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + to), _mm512_cvtepi32_epi8(upper));
    const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + to), _mm512_cvtepi32_epi8(lower));
  }
  return largest / most;
}

struct Work {
  const int8_t *high, *low;  // `low` is null for 8 bits
  const float* steps_of;     // (tokens,)
  int64_t tokens, steps;     // steps of 64 input columns
  const Weight& weight;
  const Destination& to;
};

void block_of(const Work& work, int64_t block, int& configured) {
  const int8_t* panel = static_cast<const int8_t*>(work.weight.tiles) + block * work.steps * 2 * kTileBytes;
  const int64_t tile_row = work.steps * kTileBytes, share = work.low ? 16 : 32;
  alignas(64) int32_t sums[32 * 32];
  alignas(64) float floats[32 * 32];
  alignas(64) float scales[32] = {};
  for (int64_t column = 0; column < std::min<int64_t>(32, work.weight.out - block * 32); ++column)
    scales[column] = work.weight.scales[block * 32 + column];
  for (int64_t token = 0; token < work.tokens; token += share) {
    const int upper = static_cast<int>(std::min<int64_t>(16, work.tokens - token));
    const int lower = work.low ? upper : static_cast<int>(std::clamp<int64_t>(work.tokens - token - 16, 0, 16));
    if (configured != upper * 32 + lower) {
      const int second = lower ? lower : 16;
      configure_tiles({upper, upper, second, second, upper, second, 16, 16});
      configured = upper * 32 + lower;
    }
    const int8_t* one = work.high + token / 16 * tile_row;
    const int8_t* two = work.low ? work.low + token / 16 * tile_row : lower ? one + tile_row : one;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < work.steps; ++step) {
      const int8_t* tile = panel + step * 2 * kTileBytes;
      _tile_loadd(6, tile, 64);
      _tile_loadd(4, one + step * kTileBytes, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, tile + kTileBytes, 64);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(5, two + step * kTileBytes, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      if (token == 0) prefetch(tile);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (lower) {
      _tile_stored(2, sums + 512, 128);
      _tile_stored(3, sums + 528, 128);
    }
    const int rows = work.low ? upper : upper + lower;
    for (int row = 0; row < rows; ++row)
      for (int half = 0; half < 32; half += 16) {
        __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + row * 32 + half));
        if (work.low)
          sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f),
                                _mm512_cvtepi32_ps(_mm512_load_si512(sums + 512 + row * 32 + half)));
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(work.steps_of[token + row]), _mm512_load_ps(scales + half));
        _mm512_store_ps(floats + row * 32 + half, _mm512_mul_ps(sum, scale));
      }
    put(floats, rows, token, block, work.weight, work.to, work.tokens > 16);
  }
}

}  // namespace

void linear_int8(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads) {
  const bool sixteen = tokens < weight.eight_bits_from;
  const int64_t plane = (tokens + 15) / 16 * 16 * weight.in;
  static thread_local std::vector<int8_t> bytes;
  static thread_local std::vector<float> steps_of;
  if (static_cast<int64_t>(bytes.size()) < 2 * plane + 64) bytes.resize(2 * plane + 64);
  if (static_cast<int64_t>(steps_of.size()) < tokens) steps_of.resize(tokens);
  int8_t* high = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) & ~uintptr_t{63});
  int8_t* low = sixteen ? high + plane : nullptr;
  float* steps = steps_of.data();
  const auto round = [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token)
      steps[token] = round_token(packed, token, weight.in, high, low);
  };
  if (tokens <= 8)
    round(0, tokens);
  else
    pool().run(threads, [&](int thread) { round(tokens * thread / threads, tokens * (thread + 1) / threads); });

  const Work work{high, low, steps, tokens, weight.in / 64, weight, to};
  const int64_t blocks = (weight.out + 31) / 32, share = std::clamp<int64_t>(blocks / (threads * 8), 1, 16);
  std::atomic<int64_t> next{0};
  pool().run(threads, [&](int) {
    int configured = -1;
    before_tiles();
    for (int64_t first; (first = next.fetch_add(share)) < blocks;)
      for (int64_t block = first; block < std::min(first + share, blocks); ++block) block_of(work, block, configured);
    release_tiles();
    finish_streams();
  });
}

}  // namespace ponder
#endif
