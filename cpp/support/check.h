// Checks of what callers and files hand us; one readable line each.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace dart {

template <typename Error = std::invalid_argument, typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace dart

// DART_CHECK(ok, parts...): throws std::invalid_argument (ValueError in Python) made of `parts`.
#define DART_CHECK(condition, ...)                      \
  do {                                                  \
    if (!(condition)) [[unlikely]] {                    \
      ::dart::fail<std::invalid_argument>(__VA_ARGS__); \
    }                                                   \
  } while (false)
