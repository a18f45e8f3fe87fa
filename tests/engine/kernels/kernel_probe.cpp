// Calls the kernels on made-up numbers and prints a line for each call: its name, a digest of all bits that it wrote,
// and the first of them. test_instruction_sets.py compares the lines of two instruction sets. Compiled with the folder
// of the kernels before it: this is decoder.cpp with a main function, as its structures are its own.
#include "decoder.cpp"

#include <cstdio>
#include <string>
#include <vector>

namespace {

using namespace ponder;

struct Numbers {  // the same on every machine: xorshift (Marsaglia 2003)
  uint64_t state;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
  float real() { return static_cast<float>(static_cast<int32_t>(next() >> 8) - (1 << 23)) / (1 << 23); }
  std::vector<float> reals(int64_t count, float scale = 1.0f, float offset = 0.0f) {
    std::vector<float> made(count);
    for (float& each : made) each = real() * scale + offset;
    return made;
  }
  std::vector<bf16> halves(int64_t count, float scale = 1.0f) {
    std::vector<bf16> made(count);
    for (bf16& each : made) {
      const float value = real() * scale;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      each = static_cast<bf16>(bits >> 16);
    }
    return made;
  }
};

template <typename T>
void report(const std::string& name, const std::vector<T>& written) {
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  const auto* bytes = reinterpret_cast<const unsigned char*>(written.data());
  for (size_t i = 0; i < written.size() * sizeof(T); ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
  std::printf("%s %016lx", name.c_str(), digest);
  for (size_t i = 0; i < 4; ++i) {
    float value;
    const uint32_t bits = sizeof(T) == 2 ? static_cast<uint32_t>(written[i]) << 16 : 0;
    if (sizeof(T) == 1)
      value = static_cast<float>(written[i]);
    else if (sizeof(T) == 2)
      std::memcpy(&value, &bits, 4);
    else
      std::memcpy(&value, &written[i], 4);
    std::printf(" %.6g", value);
  }
  std::printf("\n");
}

// Memory of a weight as the kernels read it: starts at a line of the cache.
struct Aligned {
  char* data;
  explicit Aligned(size_t bytes) : data(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  Aligned(Aligned&& other) : data(other.data) { other.data = nullptr; }
};

struct Made {
  Aligned tiles;
  std::vector<float> bias, scales;
  Weight weight;
};

Made bfloat16_weight(Numbers& numbers, int64_t out, int64_t in, float scale = 0.1f) {
  Made made{Aligned(packed_bytes(out, in)), numbers.reals(out), {}, {}};
  const std::vector<bf16> weight = numbers.halves(out * in, scale);
  pack_weight(weight.data(), out, in, reinterpret_cast<bf16*>(made.tiles.data));
  made.weight = {made.tiles.data, made.bias.data(), nullptr, out, in, 0, 0, 0, 0, 0};
  return made;
}

Made grouped_weight(Numbers& numbers, int64_t out, int64_t in, int64_t bits, int64_t group, bool minimums) {
  const int64_t blocks = (out + 31) / 32, header = minimums ? 128 : 64, of_group = header + group * bits * 4;
  Made made{Aligned(blocks * (in / group) * of_group), numbers.reals(out), numbers.reals(blocks * 32, 0.001f, 0.002f), {}};
  for (int64_t i = 0; i < blocks * (in / group); ++i) {
    char* at = made.tiles.data + i * of_group;
    for (int64_t j = 0; j < header; j += 2) {
      const uint16_t half = 0x3000 + numbers.next() % 0x0c00;  // 0.125 to 1
      std::memcpy(at + j, &half, 2);
    }
    for (int64_t j = header; j < of_group; ++j) at[j] = static_cast<char>(numbers.next());
  }
  made.weight = {made.tiles.data, made.bias.data(), made.scales.data(), out, in, 0, group, bits, bits == 8 ? 128 : 8,
                 minimums};
  return made;
}

void products(const std::string& name, const Made& made, Numbers numbers) {
  const Weight& weight = made.weight;
  const std::vector<float> norm = numbers.reals(weight.in, 0.5f, 1.0f);
  for (int64_t tokens : {1, 2, 3, 16, 37}) {
    const std::vector<bf16> rows = numbers.halves(tokens * weight.in, 3.0f);
    const std::string label = name + "-" + std::to_string(tokens);
    std::vector<bf16> plain(tokens * weight.out);
    ponder_linear(rows.data(), tokens, nullptr, 1e-6f, 0, &weight, plain.data(), 0, 2);
    report(label, plain);
    std::vector<float> floats(tokens * weight.out);
    ponder_linear(rows.data(), tokens, norm.data(), 1e-6f, 0, &weight, floats.data(), 1, 1);
    report(label + "-floats", floats);
    ponder_linear(rows.data(), tokens, norm.data(), 1e-6f, 1, &weight, floats.data(), 1, 1);
    report(label + "-centred", floats);
  }
}

// Two layers on three sequences: attention over a window or all of it, then a convolution or attention. The cache is
// bfloat16, or codes of 4 bits.
void layers(const std::string& name, bool grouped, bool convolves, int64_t window, Output gated, bool coded = false,
            float scale = 0.1f) {
  Numbers numbers{static_cast<uint64_t>(1000 + window)};
  const int64_t hidden = 128, heads = coded ? 2 : 4, kv_heads = heads / 2, width = hidden / heads, intermediate = 96;
  const int64_t block_size = 16;
  const auto weight = [&](int64_t out, int64_t in) {
    return grouped ? grouped_weight(numbers, out, in, 4, 32, true) : bfloat16_weight(numbers, out, in, scale);
  };
  std::vector<Made> kept;
  kept.reserve(8);
  const std::vector<float> norm = numbers.reals(hidden, 0.5f, 1.0f);
  const std::vector<float> head_norm = numbers.reals((heads + kv_heads) * width, 0.5f, 1.0f);
  const std::vector<float> taps = numbers.reals(3 * hidden);
  Layer made[2];
  for (int at = 0; at < 2; ++at) {
    const bool conv = at == 1 && convolves;
    const int64_t joined = conv ? 3 * hidden : (heads + 2 * kv_heads) * width;
    for (auto [out, in] : {std::pair{joined, hidden}, std::pair{hidden, hidden}, std::pair{2 * intermediate, hidden},
                           std::pair{hidden, intermediate}})
      kept.push_back(weight(out, in));
    const Made* of = &kept[at * 4];
    made[at] = {of[0].weight, of[1].weight, of[2].weight, of[3].weight, nullptr, norm.data(), at ? norm.data() : nullptr,
                norm.data(), nullptr, conv ? nullptr : head_norm.data(), nullptr, nullptr,
                conv ? taps.data() : nullptr, window, conv ? -1 : 0, 3};
  }
  const Model model{2, hidden, heads, kv_heads, width, intermediate, static_cast<int64_t>(gated), 1e-6f,
                    0.17f, 0.9f, made};

  const std::vector<int64_t> lengths = {70, 1, 5}, contexts = {70, 40, 23};
  std::vector<int64_t> starts = {0}, slots, tables;
  const int64_t table_stride = 5;
  for (size_t row = 0; row < lengths.size(); ++row) {
    starts.push_back(starts.back() + lengths[row]);
    for (int64_t block = 0; block < table_stride; ++block) tables.push_back((row * table_stride + block) * 7 % 15);
    for (int64_t at = contexts[row] - lengths[row]; at < contexts[row]; ++at)
      slots.push_back(tables[row * table_stride + at / block_size] * block_size + at % block_size);
  }
  const int64_t tokens = starts.back(), all_slots = 15 * block_size;
  const std::vector<float> rotations = numbers.reals(tokens * width);
  const std::vector<float> of_queries = numbers.reals(tokens * width);
  const float* const of_step[2] = {rotations.data(), of_queries.data()};
  std::vector<bf16> states = numbers.halves(tokens * hidden, 2.0f);
  std::vector<bf16> first = numbers.halves(2 * all_slots * hidden), second = numbers.halves(2 * all_slots * hidden);
  bf16* const caches[2] = {first.data(), second.data()};
  const int64_t row = kv_heads * width, of_scales = all_slots * row / kCodeGroup * 2;
  std::vector<bf16> scales = numbers.halves(4 * of_scales);
  bf16* const of_layers[2] = {scales.data(), scales.data() + 2 * of_scales};
  const Step step{tokens, 3, table_stride, block_size, 2, slots.data(), starts.data(), contexts.data(), tables.data(),
                  of_step, states.data(), caches, coded ? of_layers : nullptr, all_slots * row / (coded ? 2 : 1),
                  of_scales, all_slots * hidden / 2};
  ponder_layers(&model, &step, 0, model.layers);
  report(name, states);
  if (coded) report(name + "-scales", scales);
  report(name + "-first-cache", first);
  report(name + "-second-cache", second);
}

// Six experts, with sigmoids in groups of two, and a shared one, on one row and on several.
void mixture(const std::string& name, bool grouped, bool sigmoid) {
  Numbers numbers{11};
  const int64_t hidden = 96, width = 64, experts = 6;
  std::vector<Made> kept;
  kept.reserve(2 * experts + 2);
  std::vector<Expert> made;
  for (int64_t at = 0; at <= experts; ++at) {
    for (auto [out, in] : {std::pair{2 * width, hidden}, std::pair{hidden, width}})
      kept.push_back(grouped ? grouped_weight(numbers, out, in, 4, 32, true) : bfloat16_weight(numbers, out, in));
    made.push_back({kept[2 * at].weight, kept[2 * at + 1].weight});
  }
  const std::vector<float> router = numbers.reals(experts * hidden), bias = numbers.reals(experts);
  const std::vector<float> gate = numbers.reals(hidden);
  const Mixture of{experts + 1, hidden, static_cast<int64_t>(Output::kGatedSilu), made.data(),
                   {router.data(), sigmoid ? nullptr : bias.data(), sigmoid ? bias.data() : nullptr, gate.data(), experts,
                    2, sigmoid, true, sigmoid ? 3 : 0, 2, 1, 1.7f, 1e-20f}};
  for (int64_t tokens : {1, 37}) {
    const std::vector<bf16> rows = numbers.halves(tokens * hidden, 0.5f);
    std::vector<float> sums(tokens * hidden);
    ponder_mixture(&of, rows.data(), tokens, sums.data(), 2);
    report(name + "-" + std::to_string(tokens), sums);
  }
}

}  // namespace

int main() {
  Numbers numbers{42};
  products("bfloat16", bfloat16_weight(numbers, 72, 320), numbers);
  for (int64_t bits : {4, 8})
    for (int64_t group : {32, 64})
      for (bool minimums : {false, true})
        products("grouped-" + std::to_string(bits) + "-" + std::to_string(group) + (minimums ? "-minimums" : ""),
                 grouped_weight(numbers, 72, 320, bits, group, minimums), numbers);
  layers("layers", false, false, 0, Output::kGatedSilu);
  layers("layers-window", false, false, 20, Output::kGatedGeluTanh);
  layers("layers-convolution", false, true, 0, Output::kGatedSilu);
  layers("layers-grouped", true, true, 0, Output::kGatedSilu);
  layers("layers-coded", false, false, 0, Output::kGatedSilu, true);
  layers("layers-coded-window", true, false, 20, Output::kGatedGelu, true);
  layers("layers-far", false, false, 0, Output::kGatedSilu, false, 20.0f);  // gates of hundreds
  layers("layers-far-tanh", false, false, 21, Output::kGatedGeluTanh, false, 20.0f);
  mixture("mixture", false, false);
  mixture("mixture-grouped", true, true);
}
