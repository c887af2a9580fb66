// Libraries that stand in for CUDA's where there is no GPU: the environment names them.

#ifndef JAXKERNELS_TESTS_HOST_H_
#define JAXKERNELS_TESTS_HOST_H_

#include <cstdlib>

#define JAXKERNELS_LIBCUDA std::getenv("STAND_IN_DRIVER")
#define JAXKERNELS_LIBCUBLASLT std::getenv("STAND_IN_CUBLASLT")

#endif  // JAXKERNELS_TESTS_HOST_H_
