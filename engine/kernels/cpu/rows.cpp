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

inline void put16(bf16* to, Floats x) { store16(to, x); }
inline void put16(float* to, Floats x) { store(to, x); }

// A row's normal form is (x - mean) * scale; an RMSNorm's mean is 0, which leaves the bits of x.
struct Normal {
  float mean = 0.0f, scale = 1.0f;

  static Normal of(const bf16* row, int64_t width, float eps, bool centred) {
    Normal normal;
    if (centred) {
      Floats one = zeros(), two = one;
      for (int64_t at = 0; at < width; at += 32) {
        one = add(load16(row + at), one);
        two = add(load16(row + at + 16), two);
      }
      normal.mean = sum_of(add(one, two)) / static_cast<float>(width);
    }
    const Floats mean = splat(normal.mean);
    Floats one = zeros(), two = one;
    for (int64_t at = 0; at < width; at += 32) {
      const Floats a = sub(load16(row + at), mean), b = sub(load16(row + at + 16), mean);
      one = fmadd(a, a, one);
      two = fmadd(b, b, two);
    }
    normal.scale = 1.0f / std::sqrt(sum_of(add(one, two)) / static_cast<float>(width) + eps);
    return normal;
  }

  // Sixteen components from `at` on, times their weights.
  Floats weighted(const bf16* row, const float* weight, int64_t at) const {
    return mul(mul(sub(load16(row + at), splat(mean)), splat(scale)), load(weight + at));
  }
};

// One head: its normal form times `weight` (or as it is), rotated by `rotations` (or not).
template <typename To>
inline void turn(const bf16* from, To* to, int64_t width, Normal normal, const float* weight, const float* rotations) {
  for (int64_t at = 0; at < width; at += 16) {
    Floats x = weight ? normal.weighted(from, weight, at) : load16(from + at);
    if (rotations) x = turned(x, load(rotations + at));
    put16(to + at, x);
  }
}

// Rounds a head to the codes of a slot's K/V head.
inline void store_codes(const float* head, int64_t width, void* codes, bf16* scales, int64_t at) {
  encode_head(head, width, static_cast<uint8_t*>(codes) + at * (width / 2), scales + at * (width / kCodeGroup * 2));
}

// As bfloat16 holds it.
inline Floats as_stored(Floats x) {
  bf16 kept[16];
  store16(kept, x);
  return load16(kept);
}

}  // namespace

void norm_packed(const bf16* rows, int64_t tokens, int64_t width, const float* weight, float eps, bool centred,
                 bf16* packed, int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    const bf16* row = rows + token * width;
    bf16* to = packed + packed_at(token, width / 32, 0);
    if (!weight) {
      for (int64_t at = 0; at < width; at += 32) std::memcpy(to + at * 16, row + at, 64);
      return;
    }
    const Normal normal = Normal::of(row, width, eps, centred);
    for (int64_t at = 0; at < width; at += 32)
      store32(to + at * 16, normal.weighted(row, weight, at), normal.weighted(row, weight, at + 16));
  });
}

void norm_rows(const bf16* rows, int64_t tokens, int64_t width, const float* weight, float eps, bool centred, bf16* to,
               int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    const bf16* row = rows + token * width;
    const Normal normal = Normal::of(row, width, eps, centred);
    for (int64_t at = 0; at < width; at += 16) store16(to + token * width + at, normal.weighted(row, weight, at));
  });
}

void add_floats(bf16* rows, const float* update, int64_t tokens, int64_t width, float multiplier, int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    bf16* to = rows + token * width;
    for (int64_t at = 0; at < width; at += 16)
      store16(to + at, fmadd(as_stored(load(update + token * width + at)), splat(multiplier), load16(to + at)));
  });
}

void norm_add(bf16* rows, const bf16* update, int64_t tokens, int64_t width, const float* weight, float eps,
              bool centred, float multiplier, int threads) {
  over_tokens(tokens, width, threads, [&](int64_t token) {
    const bf16* from = update + token * width;
    bf16* to = rows + token * width;
    const Normal normal = Normal::of(from, width, eps, centred);
    for (int64_t at = 0; at < width; at += 16)
      store16(to + at, fmadd(normal.weighted(from, weight, at), splat(multiplier), load16(to + at)));
  });
}

void place(bf16* qkv, int64_t tokens, const Heads& h, const int64_t* slots, const PagedLayer& cache, int threads) {
  const int64_t row = (h.heads + 2 * h.kv_heads) * h.width, queries = h.heads * h.width, side = h.kv_heads * h.width;
  over_tokens(tokens, row, threads, [&](int64_t token) {
    bf16* of = qkv + token * row;
    const float* key_turn = h.key_rotations ? h.key_rotations + token * h.width : nullptr;
    const float* query_turn = h.query_rotations ? h.query_rotations + token * h.width : nullptr;
    Normal query_normal, key_normal;
    if (h.query_norm) {
      query_normal = Normal::of(of, queries, h.eps, h.centred);
      key_normal = Normal::of(of + queries, side, h.eps, h.centred);
    }
    for (int64_t head = 0; head < h.heads + h.kv_heads; ++head) {
      bf16* from = of + head * h.width;
      const bool key = head >= h.heads;
      const float* weight = nullptr;
      Normal normal;
      if (h.head_norm) {
        weight = h.head_norm + head * h.width;
        normal = Normal::of(from, h.width, h.eps, h.centred);
      } else if (h.query_norm) {
        weight = key ? h.key_norm + (head - h.heads) * h.width : h.query_norm + head * h.width;
        normal = key ? key_normal : query_normal;
      }
      const float* rotations = key ? key_turn : query_turn;
      const int64_t slot_head = slots[token] * h.kv_heads + head - h.heads;  // of a key
      if (!cache.quantized()) {
        bf16* to = key ? static_cast<bf16*>(cache.keys) + slot_head * h.width : from;
        turn(from, to, h.width, normal, weight, rotations);
        continue;
      }
      alignas(64) float turned_head[kMaxCodeWidth];
      turn(from, turned_head, h.width, normal, weight, rotations);
      rotate_head(turned_head, h.width);
      if (key)
        store_codes(turned_head, h.width, cache.keys, cache.key_scales, slot_head);
      else
        for (int64_t at = 0; at < h.width; at += 16) store16(from + at, load(turned_head + at));
    }
    const bf16* values = of + queries + side;
    if (!cache.quantized()) {
      std::memcpy(static_cast<bf16*>(cache.values) + slots[token] * side, values, side * sizeof(bf16));
      return;
    }
    for (int64_t head = 0; head < h.kv_heads; ++head) {
      alignas(64) float value[kMaxCodeWidth];
      for (int64_t at = 0; at < h.width; at += 16) store(value + at, load16(values + head * h.width + at));
      store_codes(value, h.width, cache.values, cache.value_scales, slots[token] * h.kv_heads + head);
    }
  });
}

void convolve(const bf16* joined, int64_t tokens, const Convolution& c, bf16* packed, int threads) {
  const int64_t half = c.width / 2;
  over_tokens(tokens, 3 * c.width, threads, [&](int64_t token) {
    const bf16 *gate = joined + token * 3 * c.width, *values = gate + 2 * c.width;
    for (int64_t at = 0; at < c.width; at += 16) {
      bf16* to = at < half ? c.low + c.slots[token] * half + at : c.high + c.slots[token] * half + at - half;
      store16(to, mul(load16(gate + at), load16(values + at)));
    }
  });
  over_tokens(tokens, 3 * c.width, threads, [&](int64_t token) {
    const int64_t row = std::upper_bound(c.starts, c.starts + c.rows + 1, token) - c.starts - 1;
    const int64_t position = c.contexts[row] - c.starts[row + 1] + token;
    const int64_t branch = c.branches.begin(row, c.contexts[row]);
    const bf16 *in = joined + token * 3 * c.width, *out = in + c.width, *values = out + c.width;
    const auto mixed = [&](int64_t at) {
      // its own product is made anew: a token that is computed again has no slot to read it from
      Floats sum = mul(as_stored(mul(load16(in + at), load16(values + at))), load(c.taps + (c.count - 1) * c.width + at));
      for (int64_t back = std::min(c.count - 1, position); back > 0; --back) {
        const int64_t before = position - back;
        const int64_t slot =
            before < branch
                ? c.tables[row * c.table_stride + before / c.block_size] * c.block_size + before % c.block_size
                : c.branches.slot(row, before);
        const bf16* from = at < half ? c.low + slot * half + at : c.high + slot * half + at - half;
        sum = fmadd(load16(from), load(c.taps + (c.count - 1 - back) * c.width + at), sum);
      }
      return mul(load16(out + at), as_stored(sum));
    };
    bf16* to = packed + packed_at(token, c.width / 32, 0);
    for (int64_t at = 0; at < c.width; at += 32) store32(to + at * 16, mixed(at), mixed(at + 16));
  });
}

}  // namespace ponder
