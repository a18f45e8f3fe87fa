// The layers of a decoder, one after the other, in one call; the plain C face of all kernels. Mirrored in binding.py.
//
// Knows as much as engine.model.decoder: norms that a family lacks are null. Nothing here allocates per step but the
// scratch memory, which grows to the largest step and stays.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "experts.h"
#include "pool.h"
#include "rows.h"

namespace ponder {

Pool& pool() {
  static Pool* shared = new Pool;  // never destroyed: its threads may outlive the exit of main
  return *shared;
}

namespace {

struct Layer {
  Weight qkv, o, gate_up, down;  // the last two without tiles: the layer has experts
  const Mixture* mixture;        // or null
  const float *attention_pre, *attention_post, *mlp_pre, *mlp_post, *head_norm, *query_norm, *key_norm;
  const float* taps;  // (count, hidden) of a short convolution, whose projections are `qkv` and `o`; null: attention
  int64_t window;     // 0: the whole context
  int64_t rotation;   // which of the step's pairs of rotations; -1: none
  int64_t tap_count;
};

struct Model {
  int64_t layers, hidden, heads, kv_heads, width, intermediate, gated;  // `gated` is the Output of the MLP's first half
  float eps, scale, residual;
  const Layer* layer;
  int64_t centred;   // norms subtract the mean first
  int64_t parallel;  // attention and MLP read one norm
};

struct Step {
  int64_t tokens, rows, table_stride, block_size, threads;
  const int64_t *slots, *starts, *contexts, *tables;
  const float* const* rotations;  // of keys and of queries, in turn
  bf16* states;            // (tokens, hidden), changed in place
  bf16* const* caches;        // of each layer: keys, then values
  bf16* const* scales;        // of each layer, likewise, where they are codes of 4 bits; else null
  int64_t cache_elements;     // of one layer's keys, bytes of their codes
  int64_t scale_elements;
  int64_t conv_elements;      // of one convolution's first halves
  const int64_t* const* layer_tables;  // of each layer, those of its K/V group in place of `tables`; or null
  const int64_t* const* layer_slots;
  Branches branches;
  const int64_t* adapters;  // of each token, -1 for none; null where no token has one
  const Updates* updates;   // (adapters, layers, 4): of qkv, o, gate_up and down
  const int64_t* last_keys;  // as Attention has them
};

// Memory for one step's activations. Two engines of a process may compute at once, so each thread has its own.
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;

  void reserve(size_t bytes) {
    if (bytes <= size) return;
    release();
    size = (bytes + (2 << 20) - 1) >> 21 << 21;
    memory = static_cast<char*>(std::aligned_alloc(2 << 20, size));
    if (memory) madvise(memory, size, MADV_HUGEPAGE);
  }
  void release() {
    std::free(memory);
    memory = nullptr;
    size = 0;
  }
  ~Scratch() { release(); }
};

thread_local Scratch scratch;

// Keys and values of a layer.
PagedLayer cache_of(const Step& step, int64_t layer) {
  bf16* keys = step.caches[layer];
  if (!step.scales) return {keys, keys + step.cache_elements, nullptr, nullptr};
  bf16* scales = step.scales[layer];
  return {keys, reinterpret_cast<uint8_t*>(keys) + step.cache_elements, scales, scales + step.scale_elements};
}

// Parts of the scratch memory.
struct Activations {
  float* sums;  // of a linear layer whose tokens have adapters; of a mixture
  bf16 *packed, *rows, *wide;
  char *choice, *experts;  // of a mixture
};

void run_layer(const Model& model, int64_t index, const Step& step, const Activations& memory) {
  bf16 *packed = memory.packed, *rows = memory.rows, *wide = memory.wide;
  const Layer& layer = model.layer[index];
  const int threads = static_cast<int>(step.threads);
  const int64_t tokens = step.tokens, hidden = model.hidden, queries = model.heads * model.width;
  const int64_t joined = queries + 2 * model.kv_heads * model.width;

  enum Place { kQkv, kO, kGateUp, kDown };
  const auto multiply = [&](const bf16* from, const Weight& weight, Place place, const Destination& to) {
    if (step.adapters)
      linear_adapted(from, tokens, weight, to,
                     {step.updates + index * 4 + place, model.layers * 4, step.adapters, memory.sums}, threads);
    else
      linear(from, tokens, weight, to, threads);
  };
  const auto open = [&] {
    multiply(packed, layer.gate_up, kGateUp, {static_cast<Output>(model.gated), wide, model.intermediate / 32, 1.0f});
  };
  norm_packed(step.states, tokens, hidden, layer.attention_pre, model.eps, model.centred, packed, threads);
  if (model.parallel) open();  // before attention takes the memory of the normed rows
  if (layer.taps) {
    multiply(packed, layer.qkv, kQkv, {Output::kRows, rows, 3 * hidden, 1.0f});
    convolve(rows, tokens,
             {layer.taps, layer.tap_count, hidden, step.slots, step.tables, step.starts, step.contexts,
              step.table_stride, step.rows, step.block_size, step.caches[index],
              step.caches[index] + step.conv_elements, step.branches},
             packed, threads);
  } else {
    const PagedLayer cache = cache_of(step, index);
    const int64_t* tables = step.layer_tables ? step.layer_tables[index] : step.tables;
    const int64_t* slots = step.layer_slots ? step.layer_slots[index] : step.slots;
    multiply(packed, layer.qkv, kQkv, {Output::kRows, rows, joined, 1.0f});
    const Heads heads{model.heads,      model.kv_heads,  model.width, layer.head_norm,
                      layer.query_norm, layer.key_norm, model.eps,  model.centred != 0,
                      layer.rotation < 0 ? nullptr : step.rotations[2 * layer.rotation],
                      layer.rotation < 0 ? nullptr : step.rotations[2 * layer.rotation + 1]};
    place(rows, tokens, heads, slots, cache, threads);
    attend({rows, joined, cache, step.block_size, model.heads, model.kv_heads, model.width, tables,
            step.table_stride, step.rows, step.starts, step.contexts, layer.window, model.scale, packed,
            step.branches, step.last_keys},
           threads);
  }
  const auto add = [&](const bf16* from, const Weight& weight, Place place, const float* post) {
    if (!post) {
      multiply(from, weight, place, {Output::kAdd, step.states, hidden, model.residual});
      return;
    }
    multiply(from, weight, place, {Output::kRows, rows, hidden, 1.0f});
    norm_add(step.states, rows, tokens, hidden, post, model.eps, model.centred, model.residual, threads);
  };
  add(packed, layer.o, kO, layer.attention_post);

  if (layer.mixture) {
    const bf16* seen = step.states;
    if (layer.mlp_pre) {
      norm_rows(step.states, tokens, hidden, layer.mlp_pre, model.eps, model.centred, rows, threads);
      seen = rows;
    }
    const Chosen chosen = route(*layer.mixture, seen, tokens, memory.choice, threads);
    run_experts(*layer.mixture, seen, tokens, chosen, memory.sums, memory.experts, threads);
    add_floats(step.states, memory.sums, tokens, hidden, model.residual, threads);
    return;
  }
  if (!model.parallel) {
    norm_packed(step.states, tokens, hidden, layer.mlp_pre, model.eps, model.centred, packed, threads);
    open();
  }
  add(wide, layer.down, kDown, layer.mlp_post);
}

}  // namespace
}  // namespace ponder

extern "C" {

// Asks the system for the tile registers, where they are used. 0, or an error number.
int ponder_start() {
#ifdef __AMX_TILE__
  return static_cast<int>(syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* TILEDATA */));
#else
  return 0;
#endif
}

int64_t ponder_packed_bytes(int64_t out, int64_t in) { return ponder::packed_bytes(out, in); }

void ponder_pack(const ponder::bf16* weight, int64_t out, int64_t in, ponder::bf16* tiles) {
  ponder::pack_weight(weight, out, in, tiles);
}

// Layers [first, last). 0, or -1 where there is no memory for the activations.
int ponder_layers(const ponder::Model* model, const ponder::Step* step, int64_t first, int64_t last) {
  using namespace ponder;
  const int64_t tokens = (step->tokens + 15) / 16 * 16;
  const int64_t queries = model->heads * model->width, joined = queries + 2 * model->kv_heads * model->width;
  size_t sums = 0, choice = 0, experts = 0;
  bool convolves = false;
  for (int64_t i = 0; i < model->layers; ++i) {
    const Layer& layer = model->layer[i];
    convolves |= layer.taps != nullptr;
    if (layer.mixture) {
      sums = std::max<size_t>(sums, tokens * model->hidden);
      choice = std::max(choice, choice_bytes(*layer.mixture, step->tokens, static_cast<int>(step->threads)));
      experts = std::max(experts, experts_bytes(*layer.mixture, step->tokens));
    }
    if (step->adapters)
      for (const Weight* weight = &layer.qkv; weight <= &layer.down; ++weight)
        sums = std::max<size_t>(sums, tokens * ((weight->out + 31) / 32 * 32));
  }
  const size_t packed = tokens * std::max(model->hidden, queries);
  const size_t rows = tokens * std::max(joined, convolves ? 3 * model->hidden : model->hidden);
  const size_t wide = tokens * model->intermediate;
  const size_t plain = (sums * sizeof(float) + (packed + rows + wide) * sizeof(bf16) + 63) / 64 * 64;
  scratch.reserve(plain + choice + experts);
  if (!scratch.memory) return -1;
  bf16* memory = reinterpret_cast<bf16*>(scratch.memory + sums * sizeof(float));
  const Activations activations{reinterpret_cast<float*>(scratch.memory), memory, memory + packed, memory + packed + rows,
                                scratch.memory + plain, scratch.memory + plain + choice};
  for (int64_t i = first; i < last; ++i) run_layer(*model, i, *step, activations);
  return 0;
}

// `to` (tokens, hidden) float32 = the weighted sum of the chosen experts' outputs. 0, or -1 without memory.
int ponder_experts(const ponder::Mixture* mixture, const ponder::bf16* rows, int64_t tokens, const int64_t* starts,
                   const int64_t* of, const float* weights, float* to, int threads) {
  using namespace ponder;
  int64_t most = 0;
  for (int64_t i = 0; i < mixture->experts; ++i) most = std::max(most, starts[i + 1] - starts[i]);
  scratch.reserve(experts_bytes(*mixture, most));
  if (!scratch.memory) return -1;
  run_experts(*mixture, rows, tokens, {starts, of, weights}, to, scratch.memory, threads);
  return 0;
}

// The same, of the experts that each token chooses.
int ponder_mixture(const ponder::Mixture* mixture, const ponder::bf16* rows, int64_t tokens, float* to, int threads) {
  using namespace ponder;
  const size_t choice = choice_bytes(*mixture, tokens, threads);
  scratch.reserve(choice + experts_bytes(*mixture, tokens));
  if (!scratch.memory) return -1;
  const Chosen chosen = route(*mixture, rows, tokens, scratch.memory, threads);
  run_experts(*mixture, rows, tokens, chosen, to, scratch.memory + choice, threads);
  return 0;
}

// `to` = RMSNorm(rows) @ weight.T in float32 (to_floats) or bfloat16, LayerNorm if `centred`; a null norm multiplies the
// rows as they are.
int ponder_linear(const ponder::bf16* rows, int64_t tokens, const float* norm, float eps, int centred,
                  const ponder::Weight* weight, void* to, int to_floats, int threads) {
  using namespace ponder;
  scratch.reserve((tokens + 15) / 16 * 16 * weight->in * sizeof(bf16) + 64);
  if (!scratch.memory) return -1;
  bf16* packed = reinterpret_cast<bf16*>(scratch.memory);
  norm_packed(rows, tokens, weight->in, norm, eps, centred, packed, threads);
  linear(packed, tokens, *weight, {to_floats ? Output::kFloats : Output::kRows, to, weight->out, 1.0f}, threads);
  return 0;
}
}
