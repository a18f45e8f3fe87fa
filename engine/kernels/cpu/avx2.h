// The sixteen numbers of lanes.h in two registers of AVX2.
#pragma once

#include <immintrin.h>

namespace ponder {

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats fmadd(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats fmsub(Floats x, Floats y, Floats z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline float sum_of(Floats x) {
  const __m256 both = _mm256_add_ps(x.a, x.b);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float max_of(Floats x) {
  const __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline Floats rounded(Floats x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 scale_above(__m256 x, __m256 least, __m256 y, __m256 whole) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256 made = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  return _mm256_and_ps(made, _mm256_cmp_ps(x, least, _CMP_GT_OQ));
}
inline Floats scale_above(Floats x, Floats least, Floats y, Floats whole) {
  return {scale_above(x.a, least.a, y.a, whole.a), scale_above(x.b, least.b, y.b, whole.b)};
}
inline __m256 turned(__m256 pairs, __m256 turn) {
  return _mm256_fmaddsub_ps(pairs, _mm256_moveldup_ps(turn),
                            _mm256_mul_ps(_mm256_permute_ps(pairs, 0xb1), _mm256_movehdup_ps(turn)));
}
inline Floats turned(Floats pairs, Floats turn) { return {turned(pairs.a, turn.a), turned(pairs.b, turn.b)}; }

inline __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints load_ints(const void* from) { return {load_256(from), load_256(static_cast<const char*>(from) + 32)}; }
inline void store_ints(void* to, Ints x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, x.b);
}
inline Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints add_ints(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints and_ints(Ints x, Ints y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Ints or_ints(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Ints shift_right_4(Ints x) { return {_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)}; }
inline int32_t sum_of(Ints x) {
  const __m256i both = _mm256_add_epi32(x.a, x.b);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline Ints load_bytes(const uint8_t* from) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all))};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_bytes(int8_t* to, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
inline __m256 outside(__m256 x, __m256i key, __m256i first, __m256i last, __m256 other) {
  const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(key, last), _mm256_cmpgt_epi32(first, key));
  return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(out));
}
inline Floats outside(Floats x, Ints key, Ints first, Ints last, Floats other) {
  return {outside(x.a, key.a, first.a, last.a, other.a), outside(x.b, key.b, first.b, last.b, other.b)};
}

inline Floats load16(const bf16* from) {
  const __m256i values = load_256(from);
  const auto widen = [](__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  };
  return {widen(_mm256_castsi256_si128(values)), widen(_mm256_extracti128_si256(values, 1))};
}
inline Floats load_half(const void* from) {
  const __m128i* at = static_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline __m256i round_up(__m256 x) {  // to nearest, ties to even; the upper 16 bits are the result
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i made = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_epi8(made, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline __m256i narrow(Floats x) {
  const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(round_up(x.a), 16), _mm256_srli_epi32(round_up(x.b), 16));
  return _mm256_permute4x64_epi64(words, 0xd8);
}
inline void store16(bf16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x)); }
inline void store32(bf16* to, Floats low, Floats high) {
  store16(to, low);
  store16(to + 16, high);
}
inline void stream32(bf16* to, Floats low, Floats high) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrow(low));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, narrow(high));
}
inline Ints pair_up(Floats x, Floats y) {
  const auto both = [](__m256 first, __m256 second) {
    return _mm256_blend_epi16(_mm256_srli_epi32(round_up(first), 16), round_up(second), 0xaa);
  };
  return {both(x.a, y.a), both(x.b, y.b)};
}
inline void interleave(__m256i x, __m256i y, bf16* to) {
  const __m256i even = _mm256_unpacklo_epi16(x, y), odd = _mm256_unpackhi_epi16(x, y);
  store_ints(to, {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)});
}
inline void interleave(Ints x, Ints y, bf16* low, bf16* high) {
  interleave(x.a, y.a, low);
  interleave(x.b, y.b, high);
}

inline void transpose8(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  __m256i u[8];
  for (int i = 0; i < 2; ++i)
    for (int half = 0; half < 2; ++half) {
      u[4 * i + 2 * half] = _mm256_unpacklo_epi64(t[4 * i + half], t[4 * i + 2 + half]);
      u[4 * i + 2 * half + 1] = _mm256_unpackhi_epi64(t[4 * i + half], t[4 * i + 2 + half]);
    }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
    r[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
  }
}
inline void transpose16(Ints (&r)[16]) {
  __m256i parts[2][2][8];  // [rows' half][columns' half]
  for (int i = 0; i < 16; ++i) {
    parts[i / 8][0][i % 8] = r[i].a;
    parts[i / 8][1][i % 8] = r[i].b;
  }
  for (auto& half : parts)
    for (auto& part : half) transpose8(part);
  for (int i = 0; i < 16; ++i) r[i] = {parts[0][i / 8][i % 8], parts[1][i / 8][i % 8]};
}

inline __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
inline Floats first_of(Ints pairs) { return {first_of(pairs.a), first_of(pairs.b)}; }
inline Floats second_of(Ints pairs) { return {second_of(pairs.a), second_of(pairs.b)}; }

// Sums of two products of bytes are 16 bits wide: codes of 4 bits fit, and of 8 bits where they are signed, as the product
// of a magnitude and a sign.
constexpr int kCodeOffset = 128;
inline __m256i dot_nibbles(__m256i sum, __m256i codes, __m256i x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
inline Ints dot_nibbles(Ints sum, Ints codes, Ints x) {
  return {dot_nibbles(sum.a, codes.a, x.a), dot_nibbles(sum.b, codes.b, x.b)};
}
inline __m256i dot_bytes(__m256i sum, __m256i codes, __m256i x) {
  const __m256i signed_codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return dot_nibbles(sum, _mm256_abs_epi8(signed_codes), _mm256_sign_epi8(x, signed_codes));
}
inline Ints dot_bytes(Ints sum, Ints codes, Ints x) {
  return {dot_bytes(sum.a, codes.a, x.a), dot_bytes(sum.b, codes.b, x.b)};
}

inline void finish_streams() { _mm_sfence(); }  // stores past the cache are seen by other threads from here on

}  // namespace ponder
