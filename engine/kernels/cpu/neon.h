// The sixteen numbers of lanes.h in four registers of NEON. Products of bytes take the instruction of ARMv8.2's dot
// products where it is there.
#pragma once

#include <arm_neon.h>

namespace ponder {

struct Floats {
  float32x4_t v[4];
};
struct Ints {
  int32x4_t v[4];
};

template <typename Op, typename... Xs>
inline Floats floats_of(Op op, const Xs&... xs) {
  return {op(xs.v[0]...), op(xs.v[1]...), op(xs.v[2]...), op(xs.v[3]...)};
}
template <typename Op, typename... Xs>
inline Ints ints_of(Op op, const Xs&... xs) {
  return {op(xs.v[0]...), op(xs.v[1]...), op(xs.v[2]...), op(xs.v[3]...)};
}

inline Floats splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Floats zeros() { return splat(0.0f); }
inline Floats load(const float* from) {
  return {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
inline void store(float* to, Floats x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(to + i * 4, x.v[i]);
}
inline Floats add(Floats x, Floats y) { return floats_of(vaddq_f32, x, y); }
inline Floats sub(Floats x, Floats y) { return floats_of(vsubq_f32, x, y); }
inline Floats mul(Floats x, Floats y) { return floats_of(vmulq_f32, x, y); }
inline Floats div(Floats x, Floats y) { return floats_of(vdivq_f32, x, y); }
inline Floats max(Floats x, Floats y) { return floats_of(vmaxq_f32, x, y); }
inline Floats min(Floats x, Floats y) { return floats_of(vminq_f32, x, y); }
inline Floats absolute(Floats x) { return floats_of(vabsq_f32, x); }
inline Floats fmadd(Floats x, Floats y, Floats z) { return floats_of(vfmaq_f32, z, x, y); }
inline Floats fmsub(Floats x, Floats y, Floats z) { return fmadd(x, y, floats_of(vnegq_f32, z)); }
inline float sum_of(Floats x) {  // in the order of the other instruction sets
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float max_of(Floats x) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}
inline Floats rounded(Floats x) { return floats_of(vrndnq_f32, x); }
// y * 2 ** whole, and 0 where x is not above `least`.
inline Floats scale_above(Floats x, Floats least, Floats y, Floats whole) {
  const auto scaled = [](float32x4_t x, float32x4_t least, float32x4_t y, float32x4_t whole) {
    const int32x4_t made = vaddq_s32(vreinterpretq_s32_f32(y), vshlq_n_s32(vcvtnq_s32_f32(whole), 23));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(made), vcgtq_f32(x, least)));
  };
  return floats_of(scaled, x, least, y, whole);
}
// Pairs (real, imaginary) times pairs (cosine, sine).
inline Floats turned(Floats pairs, Floats turn) {
  const auto rotated = [](float32x4_t pairs, float32x4_t turn) {
    const uint32x4_t first_of_pair = vreinterpretq_u32_u64(vdupq_n_u64(0x80000000u));
    const float32x4_t across = vmulq_f32(vrev64q_f32(pairs), vtrn2q_f32(turn, turn));
    const float32x4_t signs = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(across), first_of_pair));
    return vfmaq_f32(signs, pairs, vtrn1q_f32(turn, turn));
  };
  return floats_of(rotated, pairs, turn);
}

inline Ints splat_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints load_ints(const void* from) {
  const int32_t* at = static_cast<const int32_t*>(from);
  return {vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)};
}
inline void store_ints(void* to, Ints x) {
  for (int i = 0; i < 4; ++i) vst1q_s32(static_cast<int32_t*>(to) + i * 4, x.v[i]);
}
inline Ints zero_ints() { return splat_int(0); }
inline Ints add_ints(Ints x, Ints y) { return ints_of(vaddq_s32, x, y); }
inline Ints and_ints(Ints x, Ints y) { return ints_of(vandq_s32, x, y); }
inline Ints or_ints(Ints x, Ints y) { return ints_of(vorrq_s32, x, y); }
inline Ints shift_right_4(Ints x) {
  return ints_of([](int32x4_t v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), 4)); }, x);
}
inline int32_t sum_of(Ints x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}
inline Ints load_bytes(const uint8_t* from) {
  const uint8x16_t all = vld1q_u8(from);
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
  const auto widened = [](uint16x4_t half) { return vreinterpretq_s32_u32(vmovl_u16(half)); };
  return {widened(vget_low_u16(low)), widened(vget_high_u16(low)), widened(vget_low_u16(high)),
          widened(vget_high_u16(high))};
}
inline Floats to_floats(Ints x) { return floats_of([](int32x4_t v) { return vcvtq_f32_s32(v); }, x); }
inline Ints to_ints(Floats x) { return ints_of([](float32x4_t v) { return vcvtnq_s32_f32(v); }, x); }
inline void store_bytes(int8_t* to, Ints x) {
  const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
// Blends in `other` where key is outside [first, last].
inline Floats outside(Floats x, Ints key, Ints first, Ints last, Floats other) {
  const auto blended = [](float32x4_t x, int32x4_t key, int32x4_t first, int32x4_t last, float32x4_t other) {
    return vbslq_f32(vorrq_u32(vcgtq_s32(key, last), vcgtq_s32(first, key)), other, x);
  };
  return floats_of(blended, x, key, first, last, other);
}

inline float32x4_t widen(uint16x4_t half) { return vreinterpretq_f32_u32(vshll_n_u16(half, 16)); }
inline Floats load16(const bf16* from) {
  return {widen(vld1_u16(from)), widen(vld1_u16(from + 4)), widen(vld1_u16(from + 8)), widen(vld1_u16(from + 12))};
}
inline Floats load_half(const void* from) {
  const uint16_t* at = static_cast<const uint16_t*>(from);
  const auto four = [](const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); };
  return {four(at), four(at + 4), four(at + 8), four(at + 12)};
}
inline uint32x4_t round_up(float32x4_t x) {  // to nearest, ties to even; the upper 16 bits are the result
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t made = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(x, x), made, vdupq_n_u32(0x7fc00000));
}
inline void store16(bf16* to, Floats x) {
  for (int i = 0; i < 4; ++i) vst1_u16(to + i * 4, vshrn_n_u32(round_up(x.v[i]), 16));
}
inline void store32(bf16* to, Floats low, Floats high) {
  store16(to, low);
  store16(to + 16, high);
}
inline void stream32(bf16* to, Floats low, Floats high) { store32(to, low, high); }
inline void finish_streams() {}
// Pairs of bfloat16 (x, y).
inline Ints pair_up(Floats x, Floats y) {
  const auto both = [](float32x4_t first, float32x4_t second) {
    return vreinterpretq_s32_u32(vsriq_n_u32(round_up(second), round_up(first), 16));
  };
  return ints_of(both, x, y);
}
// The 32 pairs of x's and y's bfloat16 at the same place, 16 to each of `low` and `high`.
inline void interleave(Ints x, Ints y, bf16* low, bf16* high) {
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t one = vreinterpretq_u16_s32(x.v[i]), two = vreinterpretq_u16_s32(y.v[i]);
    bf16* to = (i < 2 ? low : high) + i % 2 * 16;
    vst1q_u16(to, vzip1q_u16(one, two));
    vst1q_u16(to + 8, vzip2q_u16(one, two));
  }
}

// Rows a, b, c, d of four, turned into columns.
inline void transpose4(int32x4_t& a, int32x4_t& b, int32x4_t& c, int32x4_t& d) {
  const auto pairs = [](int32x4_t x) { return vreinterpretq_s64_s32(x); };
  const auto ints = [](int64x2_t x) { return vreinterpretq_s32_s64(x); };
  const int64x2_t ab = pairs(vtrn1q_s32(a, b)), ab2 = pairs(vtrn2q_s32(a, b));
  const int64x2_t cd = pairs(vtrn1q_s32(c, d)), cd2 = pairs(vtrn2q_s32(c, d));
  a = ints(vtrn1q_s64(ab, cd));
  b = ints(vtrn1q_s64(ab2, cd2));
  c = ints(vtrn2q_s64(ab, cd));
  d = ints(vtrn2q_s64(ab2, cd2));
}
inline void transpose16(Ints (&r)[16]) {
  for (int row = 0; row < 4; ++row)
    for (int column = 0; column < 4; ++column)
      transpose4(r[row * 4].v[column], r[row * 4 + 1].v[column], r[row * 4 + 2].v[column], r[row * 4 + 3].v[column]);
  for (int row = 1; row < 4; ++row)
    for (int column = 0; column < row; ++column)
      for (int i = 0; i < 4; ++i) {
        const int32x4_t kept = r[row * 4 + i].v[column];
        r[row * 4 + i].v[column] = r[column * 4 + i].v[row];
        r[column * 4 + i].v[row] = kept;
      }
}

// The first and the second of each pair of bfloat16.
inline Floats first_of(Ints pairs) {
  const auto first = [](int32x4_t pairs) { return vreinterpretq_f32_s32(vshlq_n_s32(pairs, 16)); };
  return {first(pairs.v[0]), first(pairs.v[1]), first(pairs.v[2]), first(pairs.v[3])};
}
inline Floats second_of(Ints pairs) {
  const auto second = [](int32x4_t pairs) {
    return vreinterpretq_f32_s32(vandq_s32(pairs, vdupq_n_s32(static_cast<int32_t>(0xffff0000))));
  };
  return {second(pairs.v[0]), second(pairs.v[1]), second(pairs.v[2]), second(pairs.v[3])};
}

// sum + for each lane the products of its four bytes: unsigned in `codes`, signed in x. Codes of 8 bits are made signed.
constexpr int kCodeOffset = 128;  // subtracted from codes of 8 bits by dot_bytes
inline int32x4_t dot_signed(int32x4_t sum, int32x4_t codes, int32x4_t x) {
  const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(x);
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sum, a, b);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  return vaddq_s32(sum, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b))));
#endif
}
inline Ints dot_nibbles(Ints sum, Ints codes, Ints x) { return ints_of(dot_signed, sum, codes, x); }
inline Ints dot_bytes(Ints sum, Ints codes, Ints x) {
  const int32x4_t sign = vdupq_n_s32(static_cast<int32_t>(0x80808080));
  return dot_nibbles(sum, ints_of([&](int32x4_t v) { return veorq_s32(v, sign); }, codes), x);
}

}  // namespace ponder
