/* Streams: each is a thread that does what was issued, in its order, late. The legacy default stream waits for all that
 * was issued to the blocking streams of its device before, and these wait for it. */
#include "stand_in.h"
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* of all streams: the counts of one are conditions of others */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams, *legacy[MOST_DEVICES];
static long late_us = -1, spins = -1;

static Stream *new_stream(int device, unsigned flags, int priority) {
    Stream *new = calloc(1, sizeof *new);
    new->device = device;
    new->flags = flags;
    new->priority = priority;
    new->next = streams;
    streams = new;
    return new;
}

Stream *stream_of(cudaStream_t handle) {
    if ((uintptr_t)handle > 2) return (Stream *)handle;
    pthread_mutex_lock(&lock);
    if (!legacy[current_device]) legacy[current_device] = new_stream(current_device, 0, 0);
    Stream *found = legacy[current_device];
    pthread_mutex_unlock(&lock);
    return found;
}

Operation *operation(void (*run)(Operation *, int), const void *data, size_t size) {
    Operation *new = calloc(1, sizeof *new + size);
    new->run = run;
    new->size = size;
    if (data) memcpy(new->data, data, size);
    return new;
}

static void *serve(void *argument) {
    Stream *stream = argument;
    unsigned seed = 7;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->head) pthread_cond_wait(&changed, &lock);
        Operation *next = stream->head;
        stream->head = next->next;
        if (!stream->head) stream->tail = NULL;
        while (next->other && next->other->done < next->until && !device_error(stream->device))
            pthread_cond_wait(&changed, &lock);
        if (next->run) {
            pthread_mutex_unlock(&lock);
            if (late_us > 0 && !next->is_prompt) {
                struct timespec pause = {0, 1000l * (rand_r(&seed) % late_us)};
                nanosleep(&pause, NULL);
            }
            if (!device_error(stream->device) && !is_over) next->run(next, stream->device);
            pthread_mutex_lock(&lock);
        }
        free(next);
        stream->done++;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

/* With the lock held. */
static void issue(Stream *stream, Operation *new) {
    if (stream->tail) stream->tail->next = new;
    else stream->head = new;
    stream->tail = new;
    stream->issued++;
    if (!stream->is_started) {
        pthread_t thread;
        if (late_us < 0) late_us = setting("STAND_IN_CUDA_LATE_US", 0);
        stream->is_started = 1;
        pthread_create(&thread, NULL, serve, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&changed);
}
static void issue_wait(Stream *stream, Stream *other, long until) {
    if (other == stream || other->done >= until) return;
    Operation *new = operation(NULL, NULL, 0);
    new->other = other;
    new->until = until;
    issue(stream, new);
}
static void issue_in_order(Stream *stream, Operation *new) {
    Stream *first = legacy[stream->device];
    if (stream == first) {
        for (Stream *other = streams; other; other = other->next)
            if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking)) issue_wait(stream, other, other->issued);
    } else if (first && !(stream->flags & cudaStreamNonBlocking)) issue_wait(stream, first, first->issued);
    issue(stream, new);
}

/* With the lock held. 1 if a graph took it. */
static int put_locked(Stream *stream, Operation *new) {
    Graph *graph = stream->capture;
    if (graph) {
        new->is_captured = 1;
        if (graph->last) graph->last->next = new;
        else graph->first = new;
        graph->last = new;
    } else issue_in_order(stream, new);
    return graph != NULL;
}

int put(Stream *stream, Operation *new) {
    pthread_mutex_lock(&lock);
    int is_captured = put_locked(stream, new);
    pthread_mutex_unlock(&lock);
    return is_captured;
}
void put_behind(Stream *stream, Operation *new, Last *last[], int number) {
    pthread_mutex_lock(&lock);
    for (int place = 0; place < number && !stream->capture; place++)
        if (last[place]->stream) issue_wait(stream, last[place]->stream, last[place]->until);
    if (!put_locked(stream, new))
        for (int place = 0; place < number; place++) *last[place] = (Last){stream, stream->issued};
    pthread_mutex_unlock(&lock);
}

void put_graph(Stream *stream, Graph *graph) {
    pthread_mutex_lock(&lock);
    for (Operation *each = graph->first; each; each = each->next) {
        Operation *again = operation(each->run, each->data, each->size);
        again->is_captured = 1;
        issue_in_order(stream, again);
    }
    pthread_mutex_unlock(&lock);
}

/* -- the host waits -------------------------------------------------------------------------------------------------- */

static void wait_until(Stream *stream, long until) {
    if (spins < 0) spins = setting("STAND_IN_CUDA_SPIN", 0);
    void *released = release_gil();
    pthread_mutex_lock(&lock);
    while (stream->done < until && !device_error(stream->device)) {
        if (!spins) pthread_cond_wait(&changed, &lock);
        else {
            pthread_mutex_unlock(&lock);  /* the driver's own wait burns its core */
            for (volatile int round = 0; round < 1000; round++) {}
            pthread_mutex_lock(&lock);
        }
    }
    pthread_mutex_unlock(&lock);
    take_gil(released);
}
void wait_for(Stream *stream) { wait_until(stream, stream->issued); }
void wait_for_device(int device) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) wait_for(stream);
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    ENTER();
    UNSAFE();
    count(HOST_WAITS);
    wait_for_device(current_device);
    return failed(device_error(current_device));
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    ENTER();
    Stream *stream = stream_of(handle);
    if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
    count(HOST_WAITS);
    wait_for(stream);
    return failed(device_error(stream->device));
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    ENTER();
    Stream *stream = stream_of(handle);
    if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
    count(QUERIES);
    pthread_mutex_lock(&lock);
    int is_done = stream->done >= stream->issued;
    pthread_mutex_unlock(&lock);
    return is_done ? 0 : cudaErrorNotReady;
}

/* -- their life ------------------------------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    ENTER();
    pthread_mutex_lock(&lock);
    *handle = (cudaStream_t)new_stream(current_device, flags, priority);
    pthread_mutex_unlock(&lock);
    return 0;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) { return 0; }  /* its thread goes on: what was issued is done */
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) { *priority = stream_of(handle)->priority; return 0; }

/* -- events ---------------------------------------------------------------------------------------------------------- */

typedef struct Event { Stream *stream; long until; unsigned flags; Graph *graph; double at_ms; } Event;

static void run_mark(Operation *self, int device) {
    Event *event;
    struct timespec now;
    memcpy(&event, self->data, sizeof event);
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->at_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    ENTER();
    count(EVENTS);
    Event *new = calloc(1, sizeof *new);
    new->flags = flags;
    *handle = (cudaEvent_t)new;
    return 0;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) { return 0; }  /* an issued record may still come to it */
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t to, unsigned flags) {
    ENTER();
    Event *event = (Event *)handle;
    Stream *stream = stream_of(to);
    count(RECORDS);
    Operation *new = operation(run_mark, &event, sizeof event);
    new->is_prompt = 1;
    pthread_mutex_lock(&lock);
    event->graph = stream->capture;
    if (!event->graph) {
        issue_in_order(stream, new);
        event->stream = stream;
        event->until = stream->issued;
    } else free(new);
    pthread_mutex_unlock(&lock);
    return 0;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    ENTER();
    UNSAFE();
    Event *event = (Event *)handle;
    count(QUERIES);
    pthread_mutex_lock(&lock);
    int is_done = !event->stream || event->stream->done >= event->until;
    pthread_mutex_unlock(&lock);
    return is_done ? 0 : failed(cudaErrorNotReady);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    ENTER();
    UNSAFE();
    Event *event = (Event *)handle;
    count(HOST_WAITS);
    if (!event->stream) return 0;
    wait_until(event->stream, event->until);
    return failed(device_error(event->stream->device));
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(((Event *)to)->at_ms - ((Event *)from)->at_ms);
    return 0;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
    ENTER();
    Event *event = (Event *)awaited;
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    if (event->graph) stream->capture = event->graph;  /* this stream joins the capture: its order is the host's */
    else if (event->stream && !stream->capture) issue_wait(stream, event->stream, event->until);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* -- captures (their API is in graphs.c) ------------------------------------------------------------------------------ */

int start_capture(Stream *stream) {
    int is_free = !stream->capture;
    if (is_free) stream->capture = calloc(1, sizeof *stream->capture);
    return is_free;
}
Graph *end_capture(Stream *stream) {
    pthread_mutex_lock(&lock);
    Graph *graph = stream->capture;
    for (Stream *each = streams; graph && each; each = each->next)
        if (each->capture == graph) each->capture = NULL;
    pthread_mutex_unlock(&lock);
    return graph;
}
