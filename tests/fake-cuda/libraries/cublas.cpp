// No function of cuBLAS itself is called; the library only has to load.
#include "operation.h"

EXPORT size_t cublasGetCudartVersion() { return 12090; }
