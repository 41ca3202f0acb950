/* CUDA graphs: what was captured, in the host's order, is done again at each launch. */
#include "stand_in.h"

static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static __thread int captures_here;
static int global_captures;

/* A query of an event, say, while this thread captures, or any thread does in the global mode. */
cudaError_t unsafe(const char *call) {
    int forbidden = (mode == cudaStreamCaptureModeGlobal && __atomic_load_n(&global_captures, __ATOMIC_SEQ_CST)) ||
                    (mode == cudaStreamCaptureModeThreadLocal && captures_here);
    if (forbidden) fprintf(stderr, "[stand-in] %s during a capture\n", call);
    return forbidden ? failed(cudaErrorStreamCaptureUnsupported) : 0;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
    enum cudaStreamCaptureMode before = mode;
    mode = *other;
    *other = before;
    return 0;
}
static __thread enum cudaStreamCaptureMode mode_of_capture;
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode how) {
    ENTER();
    if ((uintptr_t)handle <= 2 || !start_capture(stream_of(handle))) return failed(cudaErrorStreamCaptureUnsupported);
    captures_here++;
    mode_of_capture = how;
    if (how == cudaStreamCaptureModeGlobal) __atomic_add_fetch(&global_captures, 1, __ATOMIC_SEQ_CST);
    return 0;
}
EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges, size_t number, enum cudaStreamCaptureMode how) {
    return refuse(__func__);
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    ENTER();
    *graph = (cudaGraph_t)end_capture(stream_of(handle));
    if (!*graph) return failed(cudaErrorStreamCaptureInvalidated);
    captures_here--;
    if (mode_of_capture == cudaStreamCaptureModeGlobal) __atomic_sub_fetch(&global_captures, 1, __ATOMIC_SEQ_CST);
    return 0;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    ENTER();
    *status = stream_of(handle)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {  // Triton 3.9 asks before a launch
    return (CUresult)cudaStreamIsCapturing(handle, (enum cudaStreamCaptureStatus *)status);
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *number) {
    Graph *captured = stream_of(handle)->capture;
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = (uintptr_t)captured;
    if (graph) *graph = (cudaGraph_t)captured;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (number) *number = 0;
    return 0;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    *ready = (cudaGraphExec_t)graph;
    return 0;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    ENTER();
    count(GRAPH_LAUNCHES);
    put_graph(stream_of(stream), (Graph *)ready);
    return 0;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    *number = 0;
    for (Operation *each = ((Graph *)graph)->first; each; each = each->next) ++*number;
    return 0;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return 0; }  /* what was instantiated is the same object */
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) { return 0; }
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned references, unsigned flags) {
    *object = calloc(1, 8);
    return 0;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned number) { return 0; }
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned number, unsigned flags) { return 0; }
