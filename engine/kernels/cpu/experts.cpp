// Mixtures of experts (Shazeer et al. 2017): scores, choice and products. Knows nothing of attention or of layers.
//
// Scores are float32, and each is one sum in one order, so the choice of a token does not depend on its batch.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pool.h"
#include "rows.h"

namespace ponder {
namespace {

constexpr int kExperts = 4;  // scores of one token that are summed side by side
constexpr float kNever = -std::numeric_limits<float>::infinity(), kLeast = std::numeric_limits<float>::lowest();

// Products of a row with rows [first, last) of `weight`.
void dots(const bf16* row, const float* weight, int64_t width, int64_t first, int64_t last, float* to) {
  for (int64_t expert = first; expert < last; expert += kExperts) {
    const int64_t some = std::min<int64_t>(kExperts, last - expert);
    Floats sums[kExperts] = {zeros(), zeros(), zeros(), zeros()};
    const float* of[kExperts];
    for (int64_t i = 0; i < kExperts; ++i) of[i] = weight + (expert + std::min(i, some - 1)) * width;
    for (int64_t at = 0; at < width; at += 16) {
      const Floats x = load16(row + at);
      for (int i = 0; i < kExperts; ++i) sums[i] = fmadd(x, load(of[i] + at), sums[i]);
    }
    for (int64_t i = 0; i < some; ++i) to[expert + i] = sum_of(sums[i]);
  }
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Logits to scores, in place.
void score(const Router& router, float* logits) {
  const int64_t count = router.experts;
  if (router.bias)
    for (int64_t i = 0; i < count; ++i) logits[i] += router.bias[i];
  if (router.sigmoid) {
    for (int64_t i = 0; i < count; ++i) logits[i] = sigmoid(logits[i]);
    return;
  }
  const float highest = *std::max_element(logits, logits + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += logits[i] = std::exp(logits[i] - highest);
  for (int64_t i = 0; i < count; ++i) logits[i] /= sum;
}

// The place of the best of `ranked`, the first among equals, which is struck out.
int64_t take_best(float* ranked, int64_t count) {
  const int64_t best = std::max_element(ranked, ranked + count) - ranked;
  ranked[best] = kNever;
  return best;
}

// Strikes out all experts but those of the groups with the highest sums of their best scores. `memory` is as long as
// `ranked`, twice.
void keep_groups(const Router& router, float* ranked, float* memory) {
  const int64_t size = router.experts / router.groups;
  float *members = memory, *summed = memory + router.experts;
  for (int64_t group = 0; group < router.groups; ++group) {
    std::copy_n(ranked + group * size, size, members);
    summed[group] = 0.0f;
    for (int64_t i = 0; i < router.group_summed; ++i) {
      summed[group] += *std::max_element(members, members + size);
      take_best(members, size);
    }
    summed[group] = std::max(summed[group], kLeast);
  }
  for (int64_t left = router.groups; left > router.groups_per_token; --left) {
    const int64_t worst = std::min_element(summed, summed + router.groups) - summed;
    summed[worst] = -kNever;
    std::fill_n(ranked + worst * size, size, kNever);
  }
}

// The experts of one token with their weights, of its logits, which are overwritten; `memory` is three times as long.
void choose(const Router& router, float* logits, float* memory, int64_t* chosen, float* weights) {
  score(router, logits);
  float* ranked = memory;
  for (int64_t i = 0; i < router.experts; ++i) {
    const float rank = logits[i] + (router.selection_bias ? router.selection_bias[i] : 0.0f);
    ranked[i] = rank > kLeast ? rank : kLeast;  // what is no number comes last, so that all chosen ones differ
  }
  if (router.groups) keep_groups(router, ranked, memory + router.experts);
  float sum = 0.0f;
  for (int64_t i = 0; i < router.per_token; ++i) {
    chosen[i] = take_best(ranked, router.experts);
    sum += weights[i] = logits[chosen[i]];
  }
  for (int64_t i = 0; i < router.per_token; ++i) {
    if (router.normalised) weights[i] /= sum + router.min_weight;
    weights[i] *= router.scaling;
  }
}

// Hands out parts of one piece of memory, or counts their bytes where it is null.
struct Arena {
  char* memory;
  size_t used = 0;

  template <typename Of>
  Of* take(int64_t count) {
    const size_t at = used;
    used += (count * sizeof(Of) + 63) / 64 * 64;
    return memory ? reinterpret_cast<Of*>(memory + at) : nullptr;
  }
};

struct ChoiceMemory {
  float *logits, *weights, *sorted_weights;
  int64_t *chosen, *starts, *sorted_tokens;
  size_t bytes;

  ChoiceMemory(const Mixture& mixture, int64_t tokens, int threads, char* memory) {
    Arena arena{memory};
    const int64_t each = mixture.router.per_token, entries = tokens * (each + mixture.shared());
    logits = arena.take<float>(4 * mixture.router.experts * threads);
    weights = arena.take<float>(tokens * each);
    sorted_weights = arena.take<float>(entries);
    chosen = arena.take<int64_t>(tokens * each);
    starts = arena.take<int64_t>(mixture.experts + 1);
    sorted_tokens = arena.take<int64_t>(entries);
    bytes = arena.used;
  }
};

struct ProductMemory {
  bf16 *gathered, *packed, *wide;
  float* sums;
  size_t bytes;

  ProductMemory(const Mixture& mixture, int64_t most, char* memory) {
    Arena arena{memory};
    int64_t width = 0;
    for (int64_t i = 0; i < mixture.experts; ++i) width = std::max(width, mixture.expert[i].down.in);
    most = (most + 15) / 16 * 16;
    gathered = arena.take<bf16>(most * mixture.hidden);
    packed = arena.take<bf16>(most * mixture.hidden);
    wide = arena.take<bf16>(most * width);
    sums = arena.take<float>(most * mixture.hidden);
    bytes = arena.used;
  }
};

}  // namespace

size_t choice_bytes(const Mixture& mixture, int64_t tokens, int threads) {
  return ChoiceMemory(mixture, tokens, threads, nullptr).bytes;
}

size_t experts_bytes(const Mixture& mixture, int64_t most) { return ProductMemory(mixture, most, nullptr).bytes; }

Chosen route(const Mixture& mixture, const bf16* rows, int64_t tokens, char* memory, int threads) {
  const Router& router = mixture.router;
  const int64_t count = router.experts, each = router.per_token, hidden = mixture.hidden;
  const ChoiceMemory of(mixture, tokens, threads, memory);
  const auto choose_one = [&](int64_t token, float* logits) {
    choose(router, logits, logits + count, of.chosen + token * each, of.weights + token * each);
  };
  pool().run(threads, [&](int thread) {
    if (tokens == 1) {
      const int64_t part = (count + threads - 1) / threads, first = std::min(count, part * thread);
      dots(rows, router.weight, hidden, first, std::min(count, first + part), of.logits);
      return;
    }
    float* logits = of.logits + thread * 4 * count;
    for (int64_t token = tokens * thread / threads; token < tokens * (thread + 1) / threads; ++token) {
      dots(rows + token * hidden, router.weight, hidden, 0, count, logits);
      choose_one(token, logits);
    }
  });
  if (tokens == 1) choose_one(0, of.logits);

  std::fill_n(of.starts, mixture.experts + 1, 0);
  for (int64_t i = 0; i < tokens * each; ++i) ++of.starts[of.chosen[i] + 1];
  for (int64_t i = 0; i < count; ++i) of.starts[i + 1] += of.starts[i];
  if (mixture.shared()) of.starts[count + 1] = of.starts[count] + tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t i = token * each; i < (token + 1) * each; ++i) {
      const int64_t at = of.starts[of.chosen[i]]++;  // the start of the next expert, in the end
      of.sorted_tokens[at] = token;
      of.sorted_weights[at] = of.weights[i];
    }
    if (!mixture.shared()) continue;
    const int64_t at = tokens * each + token;
    float gate = 0.0f;
    if (router.shared_gate) dots(rows + token * hidden, router.shared_gate, hidden, 0, 1, &gate);
    of.sorted_tokens[at] = token;
    of.sorted_weights[at] = router.shared_gate ? sigmoid(gate) : 1.0f;
  }
  std::copy_backward(of.starts, of.starts + count, of.starts + count + 1);
  of.starts[0] = 0;
  return {of.starts, of.sorted_tokens, of.sorted_weights};
}

void run_experts(const Mixture& mixture, const bf16* rows, int64_t tokens, const Chosen& chosen, float* to, char* memory,
                 int threads) {
  const int64_t hidden = mixture.hidden;
  int64_t most = 0;
  for (int64_t i = 0; i < mixture.experts; ++i) most = std::max(most, chosen.starts[i + 1] - chosen.starts[i]);
  const ProductMemory of(mixture, most, memory);
  std::memset(to, 0, tokens * hidden * sizeof(float));
  if (tokens == 1) norm_packed(rows, 1, hidden, nullptr, 0.0f, false, of.packed, threads);
  for (int64_t index = 0; index < mixture.experts; ++index) {
    const int64_t first = chosen.starts[index], count = chosen.starts[index + 1] - first;
    if (count == 0) continue;
    const Expert& expert = mixture.expert[index];
    if (tokens > 1) {
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(of.gathered + i * hidden, rows + chosen.tokens[first + i] * hidden, hidden * sizeof(bf16));
      norm_packed(of.gathered, count, hidden, nullptr, 0.0f, false, of.packed, threads);
    }
    linear(of.packed, count, expert.gate_up, {static_cast<Output>(mixture.gated), of.wide, expert.down.in / 32, 1.0f},
           threads);
    linear(of.wide, count, expert.down, {Output::kFloats, of.sums, hidden, 1.0f}, threads);
    const auto add_rows = [&](int64_t from, int64_t until) {
      for (int64_t i = from; i < until; ++i) {
        float* at = to + chosen.tokens[first + i] * hidden;
        const Floats weight = splat(chosen.weights[first + i]);
        for (int64_t column = 0; column < hidden; column += 16)
          store(at + column, fmadd(load(of.sums + i * hidden + column), weight, load(at + column)));
      }
    };
    if (count * hidden <= 1 << 14)
      add_rows(0, count);
    else
      pool().run(threads, [&](int thread) { add_rows(count * thread / threads, count * (thread + 1) / threads); });
  }
}

}  // namespace ponder
