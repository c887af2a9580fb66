// Shared by the libraries that stand in for CUDA's where there is no GPU: they write their calls
// down, and some of their functions can be made to fail. Each library is built from one source.

#ifndef JAXKERNELS_TESTS_STAND_IN_H_
#define JAXKERNELS_TESTS_STAND_IN_H_

#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace {

std::mutex mutex;
std::ostringstream events;
std::map<std::string, int> failures;

// The status that a function is to return: 0, unless it was made to fail.
template <typename Status>
Status outcome(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = failures.find(function);
  return static_cast<Status>(found == failures.end() ? 0 : found->second);
}

template <typename Write>
void note(Write write) {
  std::lock_guard<std::mutex> lock(mutex);
  write(events);
  events << "\n";
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* stand_in_events() {
  static std::string text;
  std::lock_guard<std::mutex> lock(mutex);
  text = events.str();
  events.str("");
  return text.c_str();
}

// Makes `function` return `status` from now on; 0 mends it.
void stand_in_fail(const char* function, int status) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[function] = status;
}

}  // extern "C"
#pragma GCC visibility pop

#endif  // JAXKERNELS_TESTS_STAND_IN_H_
