// How long work tells how far it is.
#pragma once

#include <cstdint>
#include <functional>

namespace dart {

// Called now and then with the work done and the whole; it may throw to stop.
using Progress = std::function<void(uint64_t done, uint64_t whole)>;

}  // namespace dart
