// What both fuzzers do with a model that a reader accepted.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DART_ADDRESS_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define DART_ADDRESS_SANITIZER 1
#endif
#ifdef DART_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

#include "core/ngram_model.h"
#include "support/mapped_file.h"

namespace dart {

constexpr size_t kPage = 4096;

// The bytes in a mapping, the rest of whose last page must not be touched.
inline Mapping guarded_copy(std::span<const uint8_t> bytes) {
  Mapping map = map_memory(bytes.size());
  if (!bytes.empty()) std::memcpy(map.data(), bytes.data(), bytes.size());
#ifdef DART_ADDRESS_SANITIZER
  const size_t rest = (kPage - bytes.size() % kPage) % kPage;
  ASAN_POISON_MEMORY_REGION(map.data() + bytes.size(), rest);
#endif
  return map;
}

// The address is mapped anew for the next input.
inline void lift_guard([[maybe_unused]] const std::byte* data, [[maybe_unused]] size_t bytes) {
#ifdef DART_ADDRESS_SANITIZER
  ASAN_UNPOISON_MEMORY_REGION(data, (bytes + kPage - 1) / kPage * kPage);
#endif
}

// Looks up contexts and candidates taken from the model and from `seed`. `sound`: the reader
// checked everything, so each probability must be one.
inline void look_up(const NgramModel& model, uint32_t seed, bool sound) {
  std::array<int32_t, 8> candidates{-1, 0, 1, 5, 7, 0x7fffffff};
  std::array<float, 8> probability;
  std::array<int32_t, 8> length;
  NgramModel::Context context = model.empty_context();
  for (int step = 0; step < 12; ++step) {
    seed = seed * 1664525 + 1013904223;
    const int level = 1 + static_cast<int>(seed >> 24) % model.order();
    const uint32_t size = model.level_size(level);
    candidates[6] = size != 0 ? model.token(level, seed % size) : 3;
    candidates[7] = static_cast<int32_t>(seed);
    model.probability(context, candidates, probability, length);
    for (size_t i = 0; i < candidates.size(); ++i) {
      const bool plausible = probability[i] >= 0 && probability[i] <= 1.0001f;
      if (sound && !plausible) std::abort();
    }
    context = model.extend(context, candidates[seed % candidates.size()]);
  }
}

}  // namespace dart
