// Reads the attributes of a custom call, for the package's XLA FFI handlers.

#ifndef JAXKERNELS_ATTRIBUTES_H_
#define JAXKERNELS_ATTRIBUTES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkernels {

template <typename T>
struct Named {
  std::string_view name;
  T value;
};

// Reads attributes one after the other and remembers the first problem; what is returned after it
// is a placeholder, so `are_right` must be asked before the values are used.
class AttributeReader {
 public:
  // `writer` is the Python function that writes the attributes.
  AttributeReader(const ffi::Dictionary& attributes, std::string_view writer)
      : attributes_(attributes), writer_(writer) {}

  bool are_right() const { return problem_.empty(); }
  const std::string& problem() const { return problem_; }

  template <typename T>
  T get(const std::string& name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    refuse(concat("attribute ", name,
                  " is missing or of another type; got: ", value.error().message(), "."));
    return T{};
  }

  int64_t number(const std::string& name, int64_t low, int64_t high) {
    return checked(name, get<int64_t>(name), low, high);
  }

  template <typename T>
  std::vector<T> numbers(const std::string& name, size_t count, int64_t low, int64_t high) {
    const auto values = get<ffi::Span<const int64_t>>(name);
    if (values.size() != count) {
      refuse(
          concat("attribute ", name, " must have ", count, " elements; got ", values.size(), "."));
    }
    std::vector<T> result;
    for (int64_t value : values) {
      result.push_back(static_cast<T>(checked(name, value, low, high)));
    }
    result.resize(count);
    return result;
  }

  template <typename T, size_t N>
  T choice(const std::string& name, const Named<T> (&table)[N]) {
    const auto wanted = get<std::string_view>(name);
    std::vector<std::string_view> known;
    for (const Named<T>& entry : table) {
      if (entry.name == wanted) return entry.value;
      known.push_back(entry.name);
    }
    refuse(
        concat("attribute ", name, " must be one of ", listed(known), "; got \"", wanted, "\"."));
    return table[0].value;
  }

  void refuse(const std::string& what) {
    if (are_right()) problem_ = concat(what, " Have ", writer_, " write the attributes.");
  }

 private:
  int64_t checked(const std::string& name, int64_t value, int64_t low, int64_t high) {
    if (low <= value && value <= high) return value;
    refuse(concat("attribute ", name, " must be from ", low, " to ", high, "; got ", value, "."));
    return low;
  }

  const ffi::Dictionary& attributes_;
  const std::string_view writer_;
  std::string problem_;
};

}  // namespace jaxkernels

#endif  // JAXKERNELS_ATTRIBUTES_H_
