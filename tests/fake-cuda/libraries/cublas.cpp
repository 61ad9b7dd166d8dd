// Of cuBLAS itself nothing is called; it only has to be there.
#include "work.h"

EXPORT size_t cublasGetCudartVersion() { return 12090; }
