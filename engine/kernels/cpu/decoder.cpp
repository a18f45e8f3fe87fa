// The layers of a decoder, one after the other, in one call; the plain C face of all kernels. Mirrored in binding.py.
//
// Knows as much as engine.model.decoder: norms that a family lacks are null. Nothing here allocates per step but the
// scratch memory, which grows to the largest step and stays.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "linear.h"
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

// A gated MLP of a mixture.
struct Expert {
  Weight gate_up, down;
};

struct Mixture {
  int64_t experts, hidden, gated;
  const Expert* expert;
};

// Tokens by the expert that they chose: expert e has entries [starts[e], starts[e + 1]).
struct Chosen {
  const int64_t *starts, *tokens;
  const float* weights;
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

void run_layer(const Model& model, int64_t index, const Step& step, bf16* packed, bf16* rows, bf16* wide, float* sums) {
  const Layer& layer = model.layer[index];
  const int threads = static_cast<int>(step.threads);
  const int64_t tokens = step.tokens, hidden = model.hidden, queries = model.heads * model.width;
  const int64_t joined = queries + 2 * model.kv_heads * model.width;

  enum Place { kQkv, kO, kGateUp, kDown };
  const auto multiply = [&](const bf16* from, const Weight& weight, Place place, const Destination& to) {
    if (step.adapters)
      linear_adapted(from, tokens, weight, to,
                     {step.updates + index * 4 + place, model.layers * 4, step.adapters, sums}, threads);
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

  if (!layer.down.tiles) return;  // of experts
  if (!model.parallel) {
    norm_packed(step.states, tokens, hidden, layer.mlp_pre, model.eps, model.centred, packed, threads);
    open();
  }
  add(wide, layer.down, kDown, layer.mlp_post);
}

// `to` (tokens, hidden) += each chosen expert's output times its weight, in the experts' order.
void run_experts(const Mixture& mixture, const bf16* rows, int64_t tokens, const Chosen& chosen, float* to, bf16* gathered,
                 bf16* packed, bf16* wide, float* sums, int threads) {
  const int64_t hidden = mixture.hidden;
  if (tokens == 1) norm_packed(rows, 1, hidden, nullptr, 0.0f, false, packed, threads);
  for (int64_t index = 0; index < mixture.experts; ++index) {
    const int64_t first = chosen.starts[index], count = chosen.starts[index + 1] - first;
    if (count == 0) continue;
    const Expert& expert = mixture.expert[index];
    if (tokens > 1) {
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(gathered + i * hidden, rows + chosen.tokens[first + i] * hidden, hidden * sizeof(bf16));
      norm_packed(gathered, count, hidden, nullptr, 0.0f, false, packed, threads);
    }
    linear(packed, count, expert.gate_up, {static_cast<Output>(mixture.gated), wide, expert.down.in / 32, 1.0f}, threads);
    linear(wide, count, expert.down, {Output::kFloats, sums, hidden, 1.0f}, threads);
    const auto add_rows = [&](int64_t from, int64_t until) {
      for (int64_t i = from; i < until; ++i) {
        float* at = to + chosen.tokens[first + i] * hidden;
        const Floats weight = splat(chosen.weights[first + i]);
        for (int64_t column = 0; column < hidden; column += 16)
          store(at + column, fmadd(load(sums + i * hidden + column), weight, load(at + column)));
      }
    };
    if (count * hidden <= 1 << 14)
      add_rows(0, count);
    else
      pool().run(threads, [&](int thread) { add_rows(count * thread / threads, count * (thread + 1) / threads); });
  }
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

// Layers [first, last), the MLP of one with experts left out. 0, or -1 where there is no memory for the activations.
int ponder_layers(const ponder::Model* model, const ponder::Step* step, int64_t first, int64_t last) {
  using namespace ponder;
  const int64_t tokens = (step->tokens + 15) / 16 * 16;
  const int64_t queries = model->heads * model->width, joined = queries + 2 * model->kv_heads * model->width;
  bool convolves = false;
  for (int64_t i = 0; i < model->layers; ++i) convolves |= model->layer[i].taps != nullptr;
  const size_t packed = tokens * std::max(model->hidden, queries);
  const size_t rows = tokens * std::max(joined, convolves ? 3 * model->hidden : model->hidden);
  const size_t wide = tokens * model->intermediate;
  size_t sums = 0;  // of a linear layer's outputs, where tokens have adapters
  if (step->adapters)
    for (int64_t i = 0; i < model->layers; ++i)
      for (const Weight* weight = &model->layer[i].qkv; weight <= &model->layer[i].down; ++weight)
        sums = std::max<size_t>(sums, tokens * ((weight->out + 31) / 32 * 32));
  scratch.reserve(sums * sizeof(float) + (packed + rows + wide) * sizeof(bf16) + 64);
  if (!scratch.memory) return -1;
  bf16* memory = reinterpret_cast<bf16*>(scratch.memory + sums * sizeof(float));
  for (int64_t i = first; i < last; ++i)
    run_layer(*model, i, *step, memory, memory + packed, memory + packed + rows,
              reinterpret_cast<float*>(scratch.memory));
  return 0;
}

// `to` (tokens, hidden) float32 = the weighted sum of the chosen experts' outputs. 0, or -1 without memory.
int ponder_experts(const ponder::Mixture* mixture, const ponder::bf16* rows, int64_t tokens, const int64_t* starts,
                   const int64_t* of, const float* weights, float* to, int threads) {
  using namespace ponder;
  int64_t most = 0, width = 0;
  for (int64_t i = 0; i < mixture->experts; ++i) {
    most = std::max(most, starts[i + 1] - starts[i]);
    width = std::max(width, mixture->expert[i].down.in);
  }
  most = (most + 15) / 16 * 16;
  const size_t row = most * mixture->hidden;
  scratch.reserve((2 * row + most * width) * sizeof(bf16) + row * sizeof(float) + 64);
  if (!scratch.memory) return -1;
  float* sums = reinterpret_cast<float*>(scratch.memory);
  bf16* memory = reinterpret_cast<bf16*>(sums + row);
  std::memset(to, 0, tokens * mixture->hidden * sizeof(float));
  run_experts(*mixture, rows, tokens, {starts, of, weights}, to, memory, memory + row, memory + 2 * row, sums, threads);
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
