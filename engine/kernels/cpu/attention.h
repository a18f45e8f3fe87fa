// Attention over the paged cache. See attention.cpp.
#pragma once

#include "tiles.h"

namespace ponder {

struct Attention {
  const bf16* queries;  // (tokens, heads * width), rows `query_stride` apart
  int64_t query_stride;
  const bf16 *keys, *values;  // (blocks, block_size, kv_heads, width)
  int64_t block_size, heads, kv_heads, width;
  const int64_t* tables;  // (rows, table_stride)
  int64_t table_stride, rows;
  const int64_t *starts, *contexts;  // (rows + 1,) and (rows,), as in engine.batch.Batch
  int64_t window;                    // 0: the whole context
  float scale;
  bf16* out;  // packed rows of width heads * width
};

void attend(const Attention& attention, int threads);

}  // namespace ponder
