// AVX-512, its bfloat16 and AMX in plain C++, for processors that lack them: the kernels are compiled with this folder
// first, and with the macros of the instruction sets set by hand. They find these types and functions before the
// compiler's, as both are in their namespace. Knows the functions that the kernels call.
//
// Semantics are those of Intel's manual, but for the order in which products of bfloat16 pairs are added: here it is that
// of AVX2, so that results can be compared bit by bit. Of how the instructions round those sums this says nothing.
#pragma once

#pragma push_macro("__AVX512F__")
#pragma push_macro("__AVX512BF16__")
#pragma push_macro("__AMX_TILE__")
#undef __AVX512F__  // the compiler's header declares its own with the options that they need
#undef __AVX512BF16__
#undef __AMX_TILE__
#include_next <immintrin.h>
#pragma pop_macro("__AVX512F__")
#pragma pop_macro("__AVX512BF16__")
#pragma pop_macro("__AMX_TILE__")

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#undef _mm512_roundscale_ps  // what compilers have as macros
#undef _mm512_permute_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_inserti64x4
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd

namespace ponder {

template <typename T>
struct alignas(64) Register {
  T lane[64 / sizeof(T)];
  template <typename To>
  Register<To> as() const {
    Register<To> made;
    std::memcpy(made.lane, lane, 64);
    return made;
  }
};
using __m512 = Register<float>;
using __m512i = Register<int32_t>;
using __m512bh = __m512i;
using __m256bh = __m256i;

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To made;
  std::memcpy(&made, &from, sizeof(To));
  return made;
}
template <typename To, typename Of>
inline To lanes(Of of) {
  To made;
  for (int i = 0; i < 16; ++i) made.lane[i] = of(i);
  return made;
}
template <typename T, typename Of>
inline T halved(Register<T> x, Of of) {  // lane i with lane i + 8, then with i + 4, as the compiler's reductions
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x.lane[i] = of(x.lane[i], x.lane[i + width]);
  return x.lane[0];
}

inline __m512 _mm512_set1_ps(float x) { return lanes<__m512>([=](int) { return x; }); }
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0); }
inline __m512i _mm512_set1_epi32(int32_t x) { return lanes<__m512i>([=](int) { return x; }); }
inline __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
inline __m512i _mm512_set1_epi16(int16_t x) { return _mm512_set1_epi32(static_cast<uint16_t>(x) * 0x10001); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return x.as<float>(); }
inline __m512i _mm512_castps_si512(__m512 x) { return x.as<int32_t>(); }

template <typename T>
inline T loaded(const void* from) {
  T made;
  std::memcpy(&made, from, sizeof(T));
  return made;
}
inline __m512 _mm512_loadu_ps(const void* from) { return loaded<__m512>(from); }
inline __m512 _mm512_load_ps(const void* from) { return loaded<__m512>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return loaded<__m512i>(from); }
inline __m512i _mm512_load_si512(const void* from) { return loaded<__m512i>(from); }
inline void _mm512_storeu_ps(void* to, __m512 x) { std::memcpy(to, x.lane, 64); }
inline void _mm512_store_ps(void* to, __m512 x) { std::memcpy(to, x.lane, 64); }
inline void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, x.lane, 64); }
inline void _mm512_stream_si512(void* to, __m512i x) { std::memcpy(to, x.lane, 64); }

// -- float32

template <typename Of>
inline __m512 each(__m512 x, __m512 y, Of of) {
  return lanes<__m512>([&](int i) { return of(x.lane[i], y.lane[i]); });
}
inline __m512 _mm512_add_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a + b; }); }
inline __m512 _mm512_sub_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a - b; }); }
inline __m512 _mm512_mul_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a * b; }); }
inline __m512 _mm512_div_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a / b; }); }
inline __m512 _mm512_max_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a > b ? a : b; }); }
inline __m512 _mm512_min_ps(__m512 x, __m512 y) { return each(x, y, [](float a, float b) { return a < b ? a : b; }); }
inline __m512 _mm512_abs_ps(__m512 x) { return each(x, x, [](float a, float) { return std::fabs(a); }); }
inline __m512 _mm512_roundscale_ps(__m512 x, int) {  // to the nearest whole number alone
  return each(x, x, [](float a, float) { return std::nearbyint(a); });
}
inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
  return lanes<__m512>([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}
inline __m512 _mm512_fmsub_ps(__m512 x, __m512 y, __m512 z) {
  return lanes<__m512>([&](int i) { return std::fma(x.lane[i], y.lane[i], -z.lane[i]); });
}
inline __m512 _mm512_fmaddsub_ps(__m512 x, __m512 y, __m512 z) {
  return lanes<__m512>([&](int i) { return std::fma(x.lane[i], y.lane[i], i % 2 ? z.lane[i] : -z.lane[i]); });
}
inline __m512 _mm512_moveldup_ps(__m512 x) {
  return lanes<__m512>([&](int i) { return x.lane[i & ~1]; });
}
inline __m512 _mm512_movehdup_ps(__m512 x) {
  return lanes<__m512>([&](int i) { return x.lane[i | 1]; });
}
inline __m512 _mm512_permute_ps(__m512 x, int order) {
  return lanes<__m512>([&](int i) { return x.lane[(i & ~3) + (order >> 2 * (i & 3) & 3)]; });
}
inline __m512 _mm512_zextps256_ps512(__m256 x) {
  __m512 made = _mm512_setzero_ps();
  std::memcpy(made.lane, &x, 32);
  return made;
}
inline float _mm512_reduce_add_ps(__m512 x) {
  return halved(x, [](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(__m512 x) {
  return halved(x, [](float a, float b) { return a > b ? a : b; });
}
inline uint16_t _mm512_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) {
    const float a = x.lane[i], b = y.lane[i];
    mask |= (predicate == _CMP_GT_OQ ? a > b : std::isnan(a) || std::isnan(b)) << i;  // else _CMP_UNORD_Q
  }
  return mask;
}
inline __m512 _mm512_maskz_scalef_ps(uint16_t mask, __m512 x, __m512 power) {
  return lanes<__m512>([&](int i) {
    return mask >> i & 1 ? static_cast<float>(x.lane[i] * std::exp2(std::floor(double{power.lane[i]}))) : 0.0f;
  });
}
inline __m512 _mm512_mask_blend_ps(uint16_t mask, __m512 x, __m512 y) {
  return lanes<__m512>([&](int i) { return mask >> i & 1 ? y.lane[i] : x.lane[i]; });
}

// -- integers

template <typename Of>
inline __m512i each(__m512i x, __m512i y, Of of) {
  return lanes<__m512i>([&](int i) {
    return static_cast<int32_t>(of(static_cast<uint32_t>(x.lane[i]), static_cast<uint32_t>(y.lane[i])));
  });
}
inline __m512i _mm512_add_epi32(__m512i x, __m512i y) { return each(x, y, [](auto a, auto b) { return a + b; }); }
inline __m512i _mm512_sub_epi32(__m512i x, __m512i y) { return each(x, y, [](auto a, auto b) { return a - b; }); }
inline __m512i _mm512_and_si512(__m512i x, __m512i y) { return each(x, y, [](auto a, auto b) { return a & b; }); }
inline __m512i _mm512_or_si512(__m512i x, __m512i y) { return each(x, y, [](auto a, auto b) { return a | b; }); }
inline __m512i _mm512_slli_epi32(__m512i x, int by) {
  return each(x, x, [=](uint32_t a, uint32_t) { return a << by; });
}
inline __m512i _mm512_srli_epi32(__m512i x, int by) {
  return each(x, x, [=](uint32_t a, uint32_t) { return a >> by; });
}
inline __m512i _mm512_srai_epi32(__m512i x, int by) {
  return each(x, x, [=](uint32_t a, uint32_t) { return static_cast<int32_t>(a) >> by; });
}
inline __m512i _mm512_add_epi16(__m512i x, __m512i y) {
  Register<uint16_t> made = x.as<uint16_t>();
  for (int i = 0; i < 32; ++i) made.lane[i] += y.as<uint16_t>().lane[i];
  return made.as<int32_t>();
}
inline int32_t _mm512_reduce_add_epi32(__m512i x) {
  return halved(x, [](int32_t a, int32_t b) { return a + b; });
}
inline uint16_t _mm512_cmpgt_epi32_mask(__m512i x, __m512i y) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (x.lane[i] > y.lane[i]) << i;
  return mask;
}
inline __m512i _mm512_mask_mov_epi32(__m512i x, uint16_t mask, __m512i y) {
  return lanes<__m512i>([&](int i) { return mask >> i & 1 ? y.lane[i] : x.lane[i]; });
}
inline __m512i _mm512_permutex2var_epi16(__m512i x, __m512i order, __m512i y) {
  const auto first = x.as<uint16_t>(), second = y.as<uint16_t>(), at = order.as<uint16_t>();
  Register<uint16_t> made;
  for (int i = 0; i < 32; ++i) made.lane[i] = (at.lane[i] & 32 ? second : first).lane[at.lane[i] & 31];
  return made.as<int32_t>();
}
inline __m512i _mm512_shuffle_i32x4(__m512i x, __m512i y, int order) {
  return lanes<__m512i>([&](int i) { return (i < 8 ? x : y).lane[4 * (order >> 2 * (i / 4) & 3) + i % 4]; });
}
inline __m512i _mm512_unpacklo_epi32(__m512i x, __m512i y) {
  return lanes<__m512i>([&](int i) { return (i % 2 ? y : x).lane[(i & ~3) + i % 4 / 2]; });
}
inline __m512i _mm512_unpackhi_epi32(__m512i x, __m512i y) {
  return lanes<__m512i>([&](int i) { return (i % 2 ? y : x).lane[(i & ~3) + 2 + i % 4 / 2]; });
}
inline __m512i _mm512_unpacklo_epi64(__m512i x, __m512i y) {
  return lanes<__m512i>([&](int i) { return (i % 4 / 2 ? y : x).lane[(i & ~3) + i % 2]; });
}
inline __m512i _mm512_unpackhi_epi64(__m512i x, __m512i y) {
  return lanes<__m512i>([&](int i) { return (i % 4 / 2 ? y : x).lane[(i & ~3) + 2 + i % 2]; });
}
inline __m512i _mm512_castsi256_si512(__m256i x) {
  __m512i made = _mm512_setzero_si512();
  std::memcpy(made.lane, &x, 32);
  return made;
}
inline __m512i _mm512_inserti64x4(__m512i x, __m256i half, int at) {
  std::memcpy(x.lane + 8 * at, &half, 32);
  return x;
}

// -- other widths

template <typename To, typename T, typename Of>
inline To narrowed(Of of) {
  T made[16];
  for (int i = 0; i < 16; ++i) made[i] = static_cast<T>(of(i));
  return loaded<To>(made);
}
inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
  return lanes<__m512i>([&](int i) { return reinterpret_cast<const uint8_t*>(&x)[i]; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  uint16_t wide[16];
  std::memcpy(wide, &x, 32);
  return lanes<__m512i>([&](int i) { return wide[i]; });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  return narrowed<__m128i, uint8_t>([&](int i) { return x.lane[i]; });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  return narrowed<__m256i, uint16_t>([&](int i) { return x.lane[i]; });
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) {
  return lanes<__m512>([&](int i) { return static_cast<float>(x.lane[i]); });
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {
  return lanes<__m512i>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x.lane[i])); });
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  uint16_t half[16];
  std::memcpy(half, &x, 32);
  return lanes<__m512>([&](int i) { return _cvtsh_ss(half[i]); });
}

// -- products of bytes and of bfloat16

// sum + the products of four bytes; x's are unsigned if `X` is.
template <typename X>
inline int32_t dot_bytes_of(int32_t sum, const void* x, const void* y) {
  for (int i = 0; i < 4; ++i) sum += static_cast<const X*>(x)[i] * static_cast<const int8_t*>(y)[i];
  return sum;
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {
  return lanes<__m512i>([&](int i) { return dot_bytes_of<uint8_t>(sum.lane[i], x.lane + i, y.lane + i); });
}

inline float normal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline uint16_t to_bfloat16(float x) {
  const auto bits = bits_of<uint32_t>(normal(x));
  return static_cast<uint16_t>(std::isnan(x) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// sum + the products of two bfloat16 numbers, the lower halves' first.
inline float add_pair(float sum, uint32_t x, uint32_t y) {
  for (const auto [one, other] : {std::pair{x << 16, y << 16}, std::pair{x & 0xffff0000u, y & 0xffff0000u}})
    sum = normal(std::fma(normal(bits_of<float>(one)), normal(bits_of<float>(other)), normal(sum)));
  return sum;
}
inline __m256i _mm512_cvtneps_pbh(__m512 x) {
  return narrowed<__m256i, uint16_t>([&](int i) { return to_bfloat16(x.lane[i]); });
}
inline __m512i _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtneps_pbh(low)), _mm512_cvtneps_pbh(high), 1);
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
  return lanes<__m512>([&](int i) { return add_pair(sum.lane[i], x.lane[i], y.lane[i]); });
}
inline __m256 _mm256_dpbf16_ps(__m256 sum, __m256bh x, __m256bh y) {
  const __m512 made =
      _mm512_dpbf16_ps(_mm512_zextps256_ps512(sum), _mm512_castsi256_si512(x), _mm512_castsi256_si512(y));
  return loaded<__m256>(made.lane);
}

// -- AMX

struct TileRegister {
  int rows;
  int32_t at[16][16];
};
inline thread_local TileRegister tile_registers[8];

inline void _tile_loadconfig(const void* config) {
  for (int i = 0; i < 8; ++i) tile_registers[i] = {static_cast<const uint8_t*>(config)[48 + i], {}};
}
inline void _tile_release() {}
inline void _tile_zero(int tile) { std::memset(tile_registers[tile].at, 0, 1024); }
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  TileRegister& to = tile_registers[tile];
  _tile_zero(tile);
  for (int row = 0; row < to.rows; ++row) std::memcpy(to.at[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
  const TileRegister& from = tile_registers[tile];
  for (int row = 0; row < from.rows; ++row) std::memcpy(static_cast<char*>(to) + row * stride, from.at[row], 64);
}
template <typename Of>
inline void multiply(int sums, int left, int right, Of of) {
  TileRegister &to = tile_registers[sums], &x = tile_registers[left], &y = tile_registers[right];
  for (int row = 0; row < to.rows; ++row)
    for (int step = 0; step < y.rows; ++step)
      for (int column = 0; column < 16; ++column)
        to.at[row][column] = of(to.at[row][column], x.at[row][step], y.at[step][column]);
}
inline void _tile_dpbf16ps(int sums, int left, int right) {
  multiply(sums, left, right, [](int32_t sum, int32_t x, int32_t y) {
    return bits_of<int32_t>(add_pair(bits_of<float>(sum), x, y));
  });
}
inline void _tile_dpbssd(int sums, int left, int right) {
  multiply(sums, left, right, [](int32_t sum, int32_t x, int32_t y) { return dot_bytes_of<int8_t>(sum, &x, &y); });
}

}  // namespace ponder
