// Norms, rotations and the way of keys and values into the cache, one pass over a token each. Knows nothing of weights'
// layouts. All arithmetic is float32, rounded to bfloat16 once, and a token is always treated by itself.
#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "pool.h"

namespace ponder {
namespace {

constexpr int64_t kAlone = 1 << 14;  // elements: less is done sooner than another thread starts

template <typename Each>
void over_tokens(int64_t tokens, int64_t width, int threads, const Each& each) {
  if (tokens * width <= kAlone) {
    for (int64_t token = 0; token < tokens; ++token) each(token);
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t share = std::max<int64_t>(1, tokens / (threads * 8));
  pool().run(threads, [&](int) {
    for (int64_t first; (first = next.fetch_add(share)) < tokens;)
      for (int64_t token = first; token < std::min(first + share, tokens); ++token) each(token);
  });
}

inline float inverse_rms(const bf16* row, int64_t width, float eps) {
  __m512 one = _mm512_setzero_ps(), two = one;
  for (int64_t at = 0; at < width; at += 32) {
    const __m512 a = load16(row + at), b = load16(row + at + 16);
    one = _mm512_fmadd_ps(a, a, one);
    two = _mm512_fmadd_ps(b, b, two);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(_mm512_add_ps(one, two)) / static_cast<float>(width) + eps);
}

inline __m512 rotate(__m512 pairs, const float* cosine_sine) {
  const __m512 turn = _mm512_loadu_ps(cosine_sine);
  const __m512 swapped = _mm512_permute_ps(pairs, 0xb1);
  return _mm512_fmaddsub_ps(pairs, _mm512_moveldup_ps(turn), _mm512_mul_ps(swapped, _mm512_movehdup_ps(turn)));
}

// One head: times `scale` and `weight` (or neither), rotated by `rotations` (or not).
inline void turn(const bf16* from, bf16* to, int64_t width, float scale, const float* weight, const float* rotations) {
  for (int64_t at = 0; at < width; at += 16) {
    __m512 x = load16(from + at);
    if (weight) x = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(scale)), _mm512_loadu_ps(weight + at));
    if (rotations) x = rotate(x, rotations + at);
    store16(to + at, x);
  }
}

}  // namespace

void norm_packed(const bf16* rows, int64_t tokens, int64_t width, const float* weight, float eps, bf16* packed,
                 int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    const bf16* row = rows + token * width;
    bf16* to = packed + packed_at(token, width / 32, 0);
    if (!weight) {
      for (int64_t at = 0; at < width; at += 32) std::memcpy(to + at * 16, row + at, 64);
      return;
    }
    const __m512 scale = _mm512_set1_ps(inverse_rms(row, width, eps));
    for (int64_t at = 0; at < width; at += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_mul_ps(load16(row + at), scale), _mm512_loadu_ps(weight + at));
      const __m512 high = _mm512_mul_ps(_mm512_mul_ps(load16(row + at + 16), scale), _mm512_loadu_ps(weight + at + 16));
      _mm512_storeu_si512(to + at * 16, narrow32(low, high));
    }
  });
}

void norm_add(bf16* rows, const bf16* update, int64_t tokens, int64_t width, const float* weight, float eps,
              float multiplier, int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    const bf16* from = update + token * width;
    bf16* to = rows + token * width;
    const __m512 scale = _mm512_set1_ps(inverse_rms(from, width, eps));
    for (int64_t at = 0; at < width; at += 16) {
      const __m512 normed = _mm512_mul_ps(_mm512_mul_ps(load16(from + at), scale), _mm512_loadu_ps(weight + at));
      store16(to + at, _mm512_fmadd_ps(normed, _mm512_set1_ps(multiplier), load16(to + at)));
    }
  });
}

void place(bf16* qkv, int64_t tokens, const Heads& h, const int64_t* slots, bf16* keys, bf16* values, int threads) {
  const int64_t row = (h.heads + 2 * h.kv_heads) * h.width, queries = h.heads * h.width, side = h.kv_heads * h.width;
  over_tokens(tokens, row, threads, [&](int64_t token) {
    bf16* of = qkv + token * row;
    const float* rotations = h.rotations ? h.rotations + token * h.width : nullptr;
    float query_scale = 1.0f, key_scale = 1.0f;
    if (h.query_norm) {
      query_scale = inverse_rms(of, queries, h.eps);
      key_scale = inverse_rms(of + queries, side, h.eps);
    }
    for (int64_t head = 0; head < h.heads + h.kv_heads; ++head) {
      bf16* from = of + head * h.width;
      const bool key = head >= h.heads;
      bf16* to = key ? keys + slots[token] * side + (head - h.heads) * h.width : from;
      const float* weight = nullptr;
      float scale = 1.0f;
      if (h.head_norm) {
        weight = h.head_norm + head * h.width;
        scale = inverse_rms(from, h.width, h.eps);
      } else if (h.query_norm) {
        weight = key ? h.key_norm + (head - h.heads) * h.width : h.query_norm + head * h.width;
        scale = key ? key_scale : query_scale;
      }
      turn(from, to, h.width, scale, weight, rotations);
    }
    std::memcpy(values + slots[token] * side, of + queries + side, side * sizeof(bf16));
  });
}

}  // namespace ponder
