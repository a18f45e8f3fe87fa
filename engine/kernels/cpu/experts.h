// Mixtures of experts: the choice of each token's experts, and their weighted sum. See experts.cpp.
#pragma once

#include "linear.h"

namespace ponder {

// A gated MLP of a mixture.
struct Expert {
  Weight gate_up, down;
};

// By what a token's experts are chosen, as engine.model.mlp.experts.routed does. Mirrored in binding.py.
struct Router {
  const float *weight, *bias, *selection_bias;  // (experts, hidden), (experts,) or null, (experts,) or null
  const float* shared_gate;                     // (hidden,) or null: the shared expert, if there is one, weighs 1
  int64_t experts, per_token;                   // without the shared one
  int64_t sigmoid, normalised;
  int64_t groups, groups_per_token, group_summed;  // groups: 0 where experts are chosen among all
  float scaling, min_weight;
};

struct Mixture {
  int64_t experts, hidden, gated;  // `gated` is the Output of the first half; a shared expert is the last
  const Expert* expert;
  Router router;  // without experts where torch chooses

  int64_t shared() const { return experts - router.experts; }
};

// Tokens by the expert that they chose: expert e has entries [starts[e], starts[e + 1]).
struct Chosen {
  const int64_t *starts, *tokens;
  const float* weights;
};

// Bytes that `route` and `run_experts` want for so many tokens, of which an expert has at most `most`.
size_t choice_bytes(const Mixture& mixture, int64_t tokens, int threads);
size_t experts_bytes(const Mixture& mixture, int64_t most);

// The choice of each of `rows` (tokens, hidden), in `memory` of `choice_bytes`. A token's bits depend on itself alone.
Chosen route(const Mixture& mixture, const bf16* rows, int64_t tokens, char* memory, int threads);
// `to` (tokens, hidden) = the weighted sum of the chosen experts' outputs, added in the experts' order, with `memory` of
// `experts_bytes`.
void run_experts(const Mixture& mixture, const bf16* rows, int64_t tokens, const Chosen& chosen, float* to, char* memory,
                 int threads);

}  // namespace ponder
