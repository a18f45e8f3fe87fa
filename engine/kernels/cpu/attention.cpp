// Softmax(q k^T) v over the paged cache, for rows of any number of queries, on tiles. Knows nothing of layers.
//
// FlashAttention's online softmax (Dao et al. 2022) over chunks of 64 keys. A tile has 16 columns: the query heads that
// share a K/V head, for as many tokens as fit. Scores are computed as k q^T, so that keys are read as they lie in the
// cache and the softmax runs down the columns without a horizontal sum. Chunks begin at multiples of 64 for any
// queries, and a chunk that is hidden from a query changes nothing: a token's bits depend neither on the batch nor on
// its prompt's chunks.
#include "attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include "pairs.h"
#include "pool.h"

namespace ponder {
namespace {

constexpr int kChunk = 64;        // keys of one step of the softmax
constexpr int kColumns = 16;      // of a tile: query heads times tokens
constexpr int64_t kSegment = 64;  // query tokens of one task
constexpr int kAhead = 128;       // rows of keys and values that are fetched while one head is computed
constexpr float kNever = -1e30f;  // a maximum before any key: finite, so that hidden chunks subtract to -inf

// What one thread reuses from task to task.
struct Room {
  std::vector<bf16> storage;
  bf16* aligned(size_t elements) {
    if (storage.size() < elements + 32) storage.resize(elements + 32);
    return reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) & ~uintptr_t{63});
  }
};

// Query tokens [first, last) of one row, for one K/V head; or, where they fill one tile only, for several of them.
class Task {
 public:
  Task(const Attention& a, int64_t row, int64_t kv_head, int64_t first, int64_t last)
      : a_(a), row_(row), kv_head_(kv_head), first_(first), last_(last) {
    group_ = a.heads / a.kv_heads;
    steps_ = a.width / 32;
    context_ = a.contexts[row];
    // position of token t of the batch is t + offset
    offset_ = context_ - a.starts[row + 1];
    branch_ = a.branches.begin(row, context_);
    begin_ = chunk_of_first(first);
  }

  // All tiles of one K/V head, one after the other: the values are packed once for all of them.
  void run() {
    const int64_t end = end_of(first_, last_), tokens = tile_tokens(a_);
    reserve(1, end - begin_);
    packed_until_ = begin_;
    for (int64_t token = first_; token < last_; token += tokens)
      for (int64_t head = 0; head < group_; head += kColumns)
        tile(token, std::min(token + tokens, last_), head, std::min<int64_t>(group_ - head, kColumns));
  }

  // One tile for each K/V head from kv_head_ to `end_head`, chunk by chunk. A step of few queries waits for memory alone,
  // and a processor reads ahead only where addresses follow each other: so a chunk of all heads is copied first, in the
  // order in which it lies in the cache.
  void run_heads(int64_t end_head) {
    const int64_t first_head = kv_head_, heads = end_head - first_head;
    reserve(heads, 1);
    std::vector<Progress> all(heads);
    for (int64_t i = 0; i < heads; ++i) {
      at_head(first_head + i, i);
      all[i] = begin_tile(first_, last_, 0, group_);
    }
    static thread_local Room keys_room, values_room;
    const int64_t of_head = kChunk * a_.width;
    bf16* keys = keys_room.aligned(heads * of_head);
    bf16* values = values_room.aligned(heads * of_head);
    for (int64_t chunk = begin_; chunk < all[0].end; ++chunk) {
      stage(find(chunk), first_head, heads, keys, values);
      const int64_t* next = find(chunk + 1);
      for (int64_t i = 0; i < heads; ++i) {
        at_head(first_head + i, i);
        look_ahead(next, i * kChunk / heads, (i + 1) * kChunk / heads, first_head, heads);
        score_rows(keys + i * of_head, all[i].columns);
        weigh_in(chunk, values + i * of_head, all[i]);
      }
    }
    for (int64_t i = 0; i < heads; ++i) {
      at_head(first_head + i, i);
      finish(all[i]);
    }
  }

  static int64_t tile_tokens(const Attention& a) { return std::max<int64_t>(1, kColumns / (a.heads / a.kv_heads)); }

 private:
  // A tile under way: columns are tokens [from, to) times heads [head, head + heads), column = (token - from) * heads +
  // head.
  struct Progress {
    int64_t from, to, head, heads, begin, end;
    int columns;
    Ints first, last;  // keys that each column sees
    Floats maximum, total;
  };

  void reserve(int64_t heads, int64_t chunks) {
    static thread_local Room values_room, keys_room, work_room;
    const int64_t tile = kColumns * a_.width;
    packed_values_ = values_room.aligned(chunks * kChunk * a_.width);
    if (a_.cache.quantized()) decoded_keys_ = keys_room.aligned(chunks * kChunk * a_.width);
    bf16* work = work_room.aligned(tile * 3 * heads + tile * 2 + kChunk * a_.width + kChunk * kColumns * 3);
    all_out_ = reinterpret_cast<float*>(work);
    part_ = all_out_ + tile * heads;
    all_queries_ = reinterpret_cast<bf16*>(part_ + tile);
    gathered_ = all_queries_ + tile * heads;
    scores_ = reinterpret_cast<float*>(gathered_ + kChunk * a_.width);
    probabilities_ = reinterpret_cast<bf16*>(scores_ + kChunk * kColumns);
    several_ = chunks > 1;
    at_head(kv_head_, 0);
  }

  void at_head(int64_t kv_head, int64_t room) {
    kv_head_ = kv_head;
    queries_ = all_queries_ + room * kColumns * a_.width;
    out_ = all_out_ + room * kColumns * a_.width;
  }

  int64_t chunk_of_first(int64_t token) const {
    return a_.window ? std::max<int64_t>(0, token + offset_ - a_.window + 1) / kChunk : 0;
  }

  // The chunks up to the last that one of the tokens sees.
  int64_t end_of(int64_t from, int64_t to) const {
    int64_t last = to - 1 + offset_;
    for (int64_t token = from; a_.last_keys && token < to; ++token) last = std::max(last, a_.last_keys[token]);
    return last / kChunk + 1;
  }

  // The heads of the cache, K/V head 0 of each place, that are the chunk's keys and values; -1 past the context.
  const int64_t* find(int64_t chunk) {
    int64_t* places = places_;
    int64_t key = chunk * kChunk, block = key / a_.block_size, within = key % a_.block_size;
    const int64_t* table = a_.tables + row_ * a_.table_stride;
    for (int k = 0; k < kChunk; ++k, ++key) {
      if (key >= context_) {
        places[k] = -1;
        continue;
      }
      const int64_t slot = key < branch_ ? table[block] * a_.block_size + within : a_.branches.slot(row_, key);
      places[k] = slot * a_.kv_heads;
      if (++within == a_.block_size) {
        within = 0;
        ++block;
      }
    }
    return places;
  }

  void tile(int64_t from, int64_t to, int64_t head, int64_t heads) {
    Progress p = begin_tile(from, to, head, heads);
    for (int64_t chunk = p.begin; chunk < p.end; ++chunk) advance(chunk, find(chunk), p);
    finish(p);
  }

  Progress begin_tile(int64_t from, int64_t to, int64_t head, int64_t heads) {
    const int columns = static_cast<int>((to - from) * heads);
    pack_queries(from, head, heads, columns);
    alignas(64) int32_t last_key[kColumns], first_key[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      const int64_t position = c < columns ? from + c / heads + offset_ : from + offset_;
      last_key[c] = static_cast<int32_t>(a_.last_keys ? a_.last_keys[position - offset_] : position);
      first_key[c] = static_cast<int32_t>(a_.window ? std::max<int64_t>(0, position - a_.window + 1) : 0);
    }
    const int64_t end = end_of(from, to);
    return {from,    to,
            head,    heads,
            chunk_of_first(from), end,
            columns, load_ints(first_key),
            load_ints(last_key), splat(kNever),
            zeros()};
  }

  void advance(int64_t chunk, const int64_t* places, Progress& p) {
    const int64_t room = several_ ? (chunk - begin_) * kChunk * a_.width : 0;
    if (chunk >= packed_until_) unpack(places, packed_values_ + room, decoded_keys_ + room);
    packed_until_ = std::max(packed_until_, chunk + 1);
    if (a_.cache.quantized())
      score_rows(decoded_keys_ + room, p.columns);
    else
      score(chunk, places, p.columns);
    weigh_in(chunk, packed_values_ + room, p);
  }

  void weigh_in(int64_t chunk, const bf16* values, Progress& p) {
    const bool masked = (chunk + 1) * kChunk > p.from + offset_ + 1 ||
                        (a_.window && chunk * kChunk < std::max<int64_t>(0, p.to - 1 + offset_ - a_.window + 1));
    const Floats shrink = soften(chunk, masked, p.first, p.last, p.maximum, p.total);
    weigh(values, shrink, chunk == p.begin, p.columns);
  }

  void pack_queries(int64_t from, int64_t head, int64_t heads, int columns) {
    for (int64_t step = 0; step < steps_; ++step) {
      Ints rows[16];
      for (int c = 0; c < kColumns; ++c)
        rows[c] = c < columns ? load_ints(a_.queries + (from + c / heads) * a_.query_stride +
                                          (kv_head_ * group_ + head + c % heads) * a_.width + step * 32)
                              : zero_ints();
      transpose16(rows);
      for (int i = 0; i < 16; ++i) store_ints(queries_ + step * kTileElements + i * 32, rows[i]);
    }
  }

  // What soften() is to fetch meanwhile: keys [from, to) of the next chunk and their values, for all heads of the task.
  void look_ahead(const int64_t* places, int64_t from, int64_t to, int64_t first_head, int64_t heads) {
    ahead_ = 0;
    const int64_t bytes = a_.cache.quantized() ? a_.width / 2 : a_.width * 2;  // of a head
    ahead_bytes_ = heads * bytes;
    for (const void* cache : {a_.cache.keys, a_.cache.values})
      for (int64_t k = from; k < std::min(to, from + kAhead / 2) && places[k] >= 0; ++k)
        ahead_rows_[ahead_++] = static_cast<const char*>(cache) + (places[k] + first_head) * bytes;
  }

  // The turn-th of 32 parts of it.
  void fetch(int turn) const {
    for (int row = turn / 2 * ahead_ / 16; row < (turn / 2 + 1) * ahead_ / 16; ++row)
      for (int64_t byte = turn % 2 * 64; byte < ahead_bytes_; byte += 128)
        __builtin_prefetch(ahead_rows_[row] + byte, 0, 2);
  }

  // Copies a chunk of several heads: keys to [head][64][width], values to [head] as pack_pair has them.
  void stage(const int64_t* places, int64_t first_head, int64_t heads, bf16* keys, bf16* values) const {
    const int64_t of_head = kChunk * a_.width;
    for (int k = 0; k < kChunk; ++k)
      for (int64_t head = 0; head < heads; ++head)
        copy_key(places[k], first_head + head, keys + head * of_head + k * a_.width);
    for (int pair = 0; pair < kChunk / 2; ++pair)
      for (int64_t head = 0; head < heads; ++head) pack_pair(pair, places, first_head + head, values + head * of_head);
  }

  // A chunk of one head: values as pack_pair has them and, of a quantized cache, keys as [64][width].
  void unpack(const int64_t* places, bf16* values, bf16* keys) const {
    for (int pair = 0; pair < kChunk / 2; ++pair) pack_pair(pair, places, kv_head_, values);
    if (a_.cache.quantized())
      for (int k = 0; k < kChunk; ++k) copy_key(places[k], kv_head_, keys + k * a_.width);
  }

  // One key as bfloat16; zeros past the context.
  void copy_key(int64_t place, int64_t head, bf16* to) const {
    if (place < 0) {
      std::memset(to, 0, a_.width * sizeof(bf16));
      return;
    }
    if (!a_.cache.quantized()) {
      const bf16* row = key_at(place, head);
      for (int64_t w = 0; w < a_.width; w += 32) store_ints(to + w, load_ints(row + w));
      return;
    }
    const Codes from = codes_at(a_.cache.keys, a_.cache.key_scales, place, head);
    for (int64_t w = 0; w < a_.width; w += kCodeGroup) {
      Floats low, high;
      decode_group(from.codes + w / 2, from.scales + w / kCodeGroup * 2, low, high);
      store32(to + w, low, high);
    }
  }

  const bf16* key_at(int64_t place, int64_t head) const {
    return static_cast<const bf16*>(a_.cache.keys) + (place + head) * a_.width;
  }

  struct Codes {
    const uint8_t* codes;
    const bf16* scales;
  };
  Codes codes_at(const void* codes, const bf16* scales, int64_t place, int64_t head) const {
    return {static_cast<const uint8_t*>(codes) + (place + head) * (a_.width / 2),
            scales + (place + head) * (a_.width / kCodeGroup * 2)};
  }

  // Two values side by side, in tiles [2][width / 16] of a chunk; zeros past the context.
  void pack_pair(int pair, const int64_t* places, int64_t head, bf16* to) const {
    const int64_t first = places[pair * 2], second = places[pair * 2 + 1];
    bf16* row = to + pair / 16 * 32 * a_.width + pair % 16 * 32;
    if (a_.cache.quantized()) {
      decode_pair(first, second, head, row);
      return;
    }
    const bf16* values = static_cast<const bf16*>(a_.cache.values);
    const bf16* one = first >= 0 ? values + (first + head) * a_.width : nullptr;
    const bf16* two = second >= 0 ? values + (second + head) * a_.width : nullptr;
    for (int64_t w = 0; w < a_.width; w += 32) {
      const Ints x = one ? load_ints(one + w) : zero_ints(), y = two ? load_ints(two + w) : zero_ints();
      bf16* at = row + w / 16 * kTileElements;
      interleave(x, y, at, at + kTileElements);
    }
  }

  void decode_pair(int64_t first, int64_t second, int64_t head, bf16* row) const {
    const Codes one = codes_at(a_.cache.values, a_.cache.value_scales, std::max<int64_t>(first, 0), head);
    const Codes two = codes_at(a_.cache.values, a_.cache.value_scales, std::max<int64_t>(second, 0), head);
    for (int64_t w = 0; w < a_.width; w += kCodeGroup) {
      Floats low[2] = {zeros(), zeros()}, high[2] = {zeros(), zeros()};
      const int64_t scales = w / kCodeGroup * 2;
      if (first >= 0) decode_group(one.codes + w / 2, one.scales + scales, low[0], high[0]);
      if (second >= 0) decode_group(two.codes + w / 2, two.scales + scales, low[1], high[1]);
      bf16* at = row + w / 16 * kTileElements;
      store_ints(at, pair_up(low[0], low[1]));
      store_ints(at + kTileElements, pair_up(high[0], high[1]));
    }
  }

  // scores_[key][column] = k . q for the chunk's keys.
  void score(int64_t chunk, const int64_t* places, int columns) {
    const bf16* tiles[4];
    std::array<int64_t, 4> strides;
    for (int i = 0; i < 4; ++i) {
      const int64_t* keys = places + i * 16;
      if (chunk * kChunk + i * 16 + 16 <= branch_ && a_.block_size % 16 == 0) {
        tiles[i] = key_at(keys[0], kv_head_);
        strides[i] = a_.kv_heads * a_.width * 2;
        continue;
      }
      bf16* rows = gathered_ + i * 16 * a_.width;
      for (int k = 0; k < 16; ++k) copy_key(keys[k], kv_head_, rows + k * a_.width);
      tiles[i] = rows;
      strides[i] = a_.width * 2;
    }
    score(tiles, strides, columns);
  }

  // For keys that lie together, (64, width).
  void score_rows(const bf16* keys, int columns) {
    const bf16* tiles[4];
    for (int tile = 0; tile < 4; ++tile) tiles[tile] = keys + tile * 16 * a_.width;
    score(tiles, {a_.width * 2, a_.width * 2, a_.width * 2, a_.width * 2}, columns);
  }

  // For 16 keys of each of four tiles, rows `strides` bytes apart.
  void score(const bf16* const (&tiles)[4], const std::array<int64_t, 4>& strides, [[maybe_unused]] int columns) {
#ifndef __AMX_TILE__
    for (int tile = 0; tile < 4; ++tile)
      multiply_rows(tiles[tile], strides[tile] / 2, queries_, steps_, columns, scores_ + tile * 256);
#else
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps_; ++step) {
      _tile_loadd(4, queries_ + step * kTileElements, 64);
      _tile_loadd(5, tiles[0] + step * 32, strides[0]);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, tiles[1] + step * 32, strides[1]);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(7, tiles[2] + step * 32, strides[2]);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, tiles[3] + step * 32, strides[3]);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, scores_, 64);
    _tile_stored(1, scores_ + 256, 64);
    _tile_stored(2, scores_ + 512, 64);
    _tile_stored(3, scores_ + 768, 64);
#endif
  }

  // Turns scores into probabilities_ relative to the new maximum; returns the factor for the sums so far.
  Floats soften(int64_t chunk, bool masked, Ints first, Ints last, Floats& maximum, Floats& total) {
    const Floats scale = splat(a_.scale * 1.4426950408889634f);  // powers of two are cheaper
    if (masked)
      for (int k = 0; k < kChunk; ++k) {
        float* at = scores_ + k * 16;
        store(at, outside(load(at), splat_int(static_cast<int32_t>(chunk * kChunk + k)), first, last, splat(-INFINITY)));
      }
    Floats largest[4];
    for (int i = 0; i < 4; ++i) largest[i] = load(scores_ + i * 16);
    for (int k = 4; k < kChunk; k += 4)
      for (int i = 0; i < 4; ++i) largest[i] = max(largest[i], load(scores_ + (k + i) * 16));
    const Floats top = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
    const Floats peak = max(maximum, mul(top, scale));
    const Floats shrink = exp2_16(sub(maximum, peak));
    maximum = peak;
    Floats even = zeros(), odd = even;
    for (int half = 0; half < 2; ++half) {
      Ints pairs[16];
      for (int i = 0; i < 16; ++i) {
        const float* at = scores_ + (half * 32 + i * 2) * 16;
        const Floats a = exp2_16(fmsub(load(at), scale, peak)), b = exp2_16(fmsub(load(at + 16), scale, peak));
        if (ahead_) fetch(half * 16 + i);
        even = add(even, a);
        odd = add(odd, b);
        pairs[i] = pair_up(a, b);
      }
      transpose16(pairs);
      for (int i = 0; i < 16; ++i) store_ints(probabilities_ + half * kTileElements + i * 32, pairs[i]);
    }
    total = fmadd(total, shrink, add(even, odd));
    return shrink;
  }

  // out_ = out_ * shrink + probabilities_ @ values.
  void weigh(const bf16* values, Floats shrink, bool first, int columns) {
    before_tiles();
    const int64_t tiles = a_.width / 16;
    float* sums = first ? out_ : part_;
#ifndef __AMX_TILE__
    for (int column = 0; column < columns; column += 4)
      for (int64_t tile = 0; tile < tiles; tile += 2)
        weigh_pairs(probabilities_ + column * 32, std::min(4, columns - column), values + tile * kTileElements,
                    tiles * kTileElements, sums + column * a_.width + tile * 16, a_.width);
#else
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      _tile_zero(0);
      _tile_zero(1);
      for (int half = 0; half < 2; ++half) {
        const bf16* from = values + (half * tiles + tile) * kTileElements;
        _tile_loadd(4, probabilities_ + half * kTileElements, 64);
        _tile_loadd(5, from, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, from + kTileElements, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, sums + tile * 16, a_.width * 4);
      _tile_stored(1, sums + tile * 16 + 16, a_.width * 4);
    }
#endif
    if (first) return;
    alignas(64) float by[kColumns];
    store(by, shrink);
    for (int c = 0; c < columns; ++c) {
      const Floats factor = splat(by[c]);
      float *to = out_ + c * a_.width, *part = part_ + c * a_.width;
      for (int64_t w = 0; w < a_.width; w += 16)
        store(to + w, fmadd(load(to + w), factor, load(part + w)));
    }
  }

  void finish(const Progress& p) {
    alignas(64) float totals[kColumns];
    store(totals, p.total);
    const int64_t blocks = a_.heads * a_.width / 32;
    for (int c = 0; c < p.columns; ++c) {
      const Floats inverse = splat(1.0f / totals[c]);
      const int64_t column = (kv_head_ * group_ + p.head + c % p.heads) * a_.width;
      const float* sums = out_ + c * a_.width;
      for (int64_t w = 0; w < a_.width; w += 32)
        store32(a_.out + packed_at(p.from + c / p.heads, blocks, column + w), mul(load(sums + w), inverse),
                mul(load(sums + w + 16), inverse));
    }
  }

  const Attention& a_;
  int64_t row_, kv_head_, first_, last_, group_, steps_, context_, branch_, offset_, begin_, packed_until_;
  bool several_;  // chunks of packed values, for tiles to come
  int64_t places_[kChunk];
  int ahead_ = 0;
  int64_t ahead_bytes_ = 0;
  const char* ahead_rows_[kAhead];
  bf16 *packed_values_, *decoded_keys_ = nullptr, *gathered_, *all_queries_, *queries_, *probabilities_;
  float *all_out_, *out_, *part_, *scores_;
};

}  // namespace

void attend(const Attention& a, int threads) {
  const int64_t group = a.heads / a.kv_heads;
  const auto one_tile = [&](int64_t row) {
    return group <= kColumns && a.starts[row + 1] - a.starts[row] <= Task::tile_tokens(a);
  };
  // Rows of one tile are cut by heads only as far as all threads need something to do.
  const int64_t parts = std::clamp<int64_t>((2 * threads + a.rows - 1) / a.rows, 1, a.kv_heads);
  std::vector<int64_t> before(a.rows + 1, 0);  // tasks are counted through rows in order; long ones come in pieces
  for (int64_t row = 0; row < a.rows; ++row)
    before[row + 1] = before[row] + (one_tile(row) ? parts
                                                   : (a.starts[row + 1] - a.starts[row] + kSegment - 1) / kSegment *
                                                         a.kv_heads);
  std::atomic<int64_t> next{0};
  pool().run(threads, [&](int) {
#ifdef __AMX_TILE__
    configure_tiles({16, 16, 16, 16, 16, 16, 16, 16});
#endif
    int64_t row = 0;
    for (int64_t index; (index = next.fetch_add(1)) < before[a.rows];) {
      while (before[row + 1] <= index) ++row;
      const int64_t task = index - before[row];
      if (one_tile(row)) {
        if (a.starts[row + 1] > a.starts[row])
          Task(a, row, task * a.kv_heads / parts, a.starts[row], a.starts[row + 1])
              .run_heads((task + 1) * a.kv_heads / parts);
        continue;
      }
      const int64_t first = a.starts[row] + task / a.kv_heads * kSegment;
      Task(a, row, task % a.kv_heads, first, std::min(first + kSegment, a.starts[row + 1])).run();
    }
    release_tiles();
  });
}

}  // namespace ponder
