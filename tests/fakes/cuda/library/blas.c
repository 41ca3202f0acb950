/* cuBLAS: handles, and nothing else. operations.py computes torch's matrix products; a call that comes here all the same
 * is refused (the generated part of the library), so that nobody takes numbers for a product that are none. */
#include "stand_in.h"

EXPORT int cublasCreate_v2(void **handle) { *handle = calloc(1, 64); return 0; }
EXPORT int cublasDestroy_v2(void *handle) { free(handle); return 0; }
EXPORT int cublasSetStream_v2(void *handle, cudaStream_t stream) { return 0; }
EXPORT int cublasSetWorkspace_v2(void *handle, void *memory, size_t size) { return 0; }
EXPORT int cublasSetMathMode(void *handle, int mode) { return 0; }
EXPORT int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT int cublasSetPointerMode_v2(void *handle, int mode) { return 0; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
