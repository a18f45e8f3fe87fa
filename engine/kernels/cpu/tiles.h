// Tiles, bfloat16 and the layouts that all kernels share. Knows nothing of layers.
//
// A tile is 16 rows of 64 bytes: a register of AMX, or, compiled without AMX, memory that AVX512-BF16 reads
// (pairs.h). The layouts are the same, and so is a kernel's promise: a sum runs over its terms in one order.
//
// "Packed rows" are activations (tokens, width) as tiles of 16 tokens by 32 columns, [tokens / 16][width / 32][16][32]:
// the contents of a tile register lie together, and rows a power of two apart do not fight for the same cache lines. Every
// kernel that feeds a linear layer writes packed rows.
#pragma once

#include "lanes.h"

namespace ponder {

constexpr int kTileRows = 16;
constexpr int kTileElements = 512;  // 16 rows of 32 bfloat16

#ifdef __AMX_TILE__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles 64 bytes wide; tile i has rows[i] rows.
inline void configure_tiles(const int (&rows)[8]) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic does not say that it reads all 64 bytes
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }
#else
inline void release_tiles() {}
#endif

// Makes earlier stores visible to the tile loads after it: their intrinsics do not say that they read memory.
inline void before_tiles() { asm volatile("" ::: "memory"); }

// Where column `column` of token `token` is in packed rows of width 32 * blocks.
inline size_t packed_at(size_t token, size_t blocks, size_t column) {
  return (token / 16 * blocks + column / 32) * kTileElements + token % 16 * 32 + column % 32;
}

}  // namespace ponder
