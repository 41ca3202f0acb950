/* NCCL over a file in /dev/shm: a collective is an operation of its stream, which waits there for the other ranks. */
#include "numbers.h"
#include "stand_in.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SLOT = 1 << 20, MOST_RANKS = 64, MOST_SCALED = 64, MOST_TRANSFERS = 512 };
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, SCALED };  /* from SCALED on: made by ncclRedOpCreatePreMulSum */
enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER, ALL_TO_ALL, SEND, RECEIVE, HANG };

typedef struct { char bytes[128]; } UniqueId;
typedef struct Shared {  /* the head of the file; then a slot for each rank, then a mailbox for each pair */
    volatile int arrived, generation;
    volatile long colors[MOST_RANKS];
    volatile int is_full[MOST_RANKS][MOST_RANKS];
} Shared;
typedef struct Communicator {
    Shared *shared;
    char *slots, *mailboxes;
    int rank, size, device;
    volatile int is_aborted;
    unsigned splits;
    uint64_t id;
    Last last;  /* its collectives run in the host's order, on whatever streams they are issued */
} Communicator;
typedef struct Transfer { enum Kind kind; const char *from; char *to; size_t number; int type, operation, peer; size_t done; Communicator *group; } Transfer;

static double scales[MOST_SCALED];
static int number_of_scales;

/* -- what a stream does ---------------------------------------------------------------------------------------------- */

/* 0 if the communicator was aborted meanwhile. */
static int meet(Communicator *group) {
    int generation = group->shared->generation;
    if (__atomic_add_fetch(&group->shared->arrived, 1, __ATOMIC_SEQ_CST) == group->size) {
        group->shared->arrived = 0;
        __atomic_add_fetch(&group->shared->generation, 1, __ATOMIC_SEQ_CST);
        return 1;
    }
    while (group->shared->generation == generation) {
        if (group->is_aborted || device_error(group->device)) return 0;
        usleep(50);
    }
    return 1;
}
static char *slot(Communicator *group, int rank) { return group->slots + (size_t)rank * SLOT; }

static void fold(Communicator *group, char *to, size_t number, int type, int how) {
    double scale = how >= SCALED ? scales[(how - SCALED) % MOST_SCALED] : 1;
    int is_wrong = fault("bad-sum", group->rank);
    for (size_t at = 0; at < number; at++) {
        if (is_float(type)) {
            double value = get_float(slot(group, 0), at, type) * scale;
            for (int rank = 1; rank < group->size; rank++) {
                double next = get_float(slot(group, rank), at, type) * scale;
                value = how == PRODUCT ? value * next : how == MAXIMUM ? (next > value || isnan(next) ? next : value)
                      : how == MINIMUM ? (next < value || isnan(next) ? next : value) : value + next;
            }
            if (is_wrong && at == 7) value += 1;
            set_float(to, at, type, how == AVERAGE ? value / group->size : value);
        } else {
            int64_t value = get_integer(slot(group, 0), at, type);
            for (int rank = 1; rank < group->size; rank++) {
                int64_t next = get_integer(slot(group, rank), at, type);
                value = how == PRODUCT ? value * next : how == MAXIMUM ? (next > value ? next : value)
                      : how == MINIMUM ? (next < value ? next : value) : value + next;
            }
            if (is_wrong && at == 7) value += 1;
            set_integer(to, at, type, how == AVERAGE ? value / group->size : value);
        }
    }
}

/* In pieces that fit a slot: all write, all have met, all read, all have met again. */
static void collective(Transfer *transfer) {
    Communicator *group = transfer->group;
    size_t width = width_of(transfer->type), number = transfer->number, most = SLOT / width;
    int rounds = transfer->kind == REDUCE_SCATTER || transfer->kind == ALL_TO_ALL ? group->size : 1;
    int is_root = group->rank == transfer->peer;
    for (int round = 0; round < rounds; round++)
        for (size_t at = 0; at < (number ? number : 1); at += most) {
            size_t now = number - at < most ? number - at : most;
            const char *from = transfer->from + (round * number + at) * width;
            if (transfer->kind != BROADCAST || is_root) memcpy(slot(group, group->rank), from, now * width);
            if (!meet(group)) return;
            char *to = transfer->to + at * width;
            switch (transfer->kind) {
                case REDUCE: if (!is_root) break;  /* fall through */
                case ALL_REDUCE: fold(group, to, now, transfer->type, transfer->operation); break;
                case REDUCE_SCATTER: if (round == group->rank) fold(group, to, now, transfer->type, transfer->operation); break;
                case BROADCAST: memmove(to, slot(group, transfer->peer), now * width); break;
                case GATHER: if (!is_root) break;  /* fall through */
                case ALL_GATHER:
                    for (int rank = 0; rank < group->size; rank++) memcpy(to + rank * number * width, slot(group, rank), now * width);
                    break;
                default:
                    for (int rank = 0; rank < group->size && round == group->rank; rank++)
                        memcpy(to + rank * number * width, slot(group, rank), now * width);
            }
            if (!meet(group)) return;
        }
}
/* One piece, if the mailbox is in the right state. */
static void advance(Transfer *transfer) {
    Communicator *group = transfer->group;
    int receives = transfer->kind == RECEIVE;
    int from = receives ? transfer->peer : group->rank, to = receives ? group->rank : transfer->peer;
    volatile int *is_full = &group->shared->is_full[from][to];
    char *mailbox = group->mailboxes + ((size_t)from * group->size + to) * SLOT;
    size_t width = width_of(transfer->type), left = transfer->number - transfer->done, now = left < SLOT / width ? left : SLOT / width;
    if (*is_full != receives) return;
    if (receives) memcpy(transfer->to + transfer->done * width, mailbox, now * width);
    else memcpy(mailbox, transfer->from + transfer->done * width, now * width);
    transfer->done += now;
    __atomic_store_n(is_full, !receives, __ATOMIC_SEQ_CST);
}
static void run_transfers(Operation *self, int device) {
    Transfer *all = (Transfer *)self->data;
    size_t number = self->size / sizeof *all, open = 0;
    for (size_t place = 0; place < number; place++) {
        all[place].done = 0;
        if (all[place].kind == HANG) while (!all[place].group->is_aborted && !device_error(device)) usleep(1000);
        else if (all[place].kind < SEND) collective(&all[place]);
        else open++;
    }
    while (open) {
        open = 0;
        for (size_t place = 0; place < number; place++)
            if (all[place].kind >= SEND && all[place].kind <= RECEIVE && all[place].done < all[place].number) {
                if (all[place].group->is_aborted || device_error(device)) return;
                advance(&all[place]);
                open += all[place].done < all[place].number;
            }
        if (open) usleep(30);
    }
}

/* -- what the host issues: one operation for all of an ncclGroup and stream -------------------------------------------- */

static __thread int depth, pending;
static __thread struct { Transfer transfer; Stream *stream; } waiting[MOST_TRANSFERS];

static void issue(void) {
    while (pending) {
        Stream *stream = waiting[0].stream;
        int taken = 0, kept = 0, groups = 0;
        Last *last[MOST_TRANSFERS];
        Operation *new = operation(run_transfers, NULL, pending * sizeof(Transfer));
        for (int place = 0; place < pending; place++) {
            if (waiting[place].stream == stream) {
                Last *of_group = &waiting[place].transfer.group->last;
                memcpy(new->data + taken++ * sizeof(Transfer), &waiting[place].transfer, sizeof(Transfer));
                if (!groups || last[groups - 1] != of_group) last[groups++] = of_group;
            } else waiting[kept++] = waiting[place];
        }
        new->size = taken * sizeof(Transfer);
        pending = kept;
        put_behind(stream, new, last, groups);
    }
}
static int transfer(enum Kind kind, const void *from, void *to, size_t number, int type, int how, int peer, Communicator *group, cudaStream_t stream) {
    if (enter("NCCL")) return 1;
    if (group->is_aborted || pending == MOST_TRANSFERS) return INVALID_USAGE;
    count(COLLECTIVES);
    trace("collective %d of %zu elements on rank %d of %d", kind, number, group->rank, group->size);
    if (fault("die-op", group->rank)) abort();
    if (fault("fail-op", group->rank)) return SYSTEM_ERROR;
    if (fault("silent-op", group->rank)) return SUCCESS;  /* returns, and does nothing */
    while (fault("block-op", group->rank)) sleep(1000);   /* the host does not come back */
    if (fault("hang-op", group->rank)) kind = HANG;       /* its stream does not come back */
    waiting[pending].transfer = (Transfer){kind, from, to, number, type, how, peer, 0, group};
    waiting[pending++].stream = stream_of(stream);
    if (!depth) issue();
    return SUCCESS;
}
EXPORT int ncclGroupStart(void) { depth++; return SUCCESS; }
EXPORT int ncclGroupEnd(void) {
    if (!depth) return INVALID_USAGE;
    if (!--depth) issue();
    return SUCCESS;
}

/* -- communicators --------------------------------------------------------------------------------------------------- */

static uint64_t hash(const void *bytes, size_t size, uint64_t value) {
    for (size_t at = 0; at < size; at++) value = (value ^ ((const unsigned char *)bytes)[at]) * 1099511628211ul;
    return value;
}
static int open_communicator(Communicator **opened, uint64_t id, int size, int rank) {
    char path[256];
    const char *folder = getenv("STAND_IN_NCCL_FOLDER");
    void *released = release_gil();
    size_t bytes = sizeof(Shared) + (size_t)size * SLOT + (size_t)size * size * SLOT;
    while (fault("hang-init", rank)) sleep(1000);
    snprintf(path, sizeof path, "%s/stand-in-nccl-%016lx", folder ? folder : "/dev/shm", (unsigned long)id);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || size > MOST_RANKS || ftruncate(file, bytes)) { take_gil(released); return SYSTEM_ERROR; }
    Communicator *new = calloc(1, sizeof *new);
    new->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    new->slots = (char *)(new->shared + 1);
    new->mailboxes = new->slots + (size_t)size * SLOT;
    new->rank = rank;
    new->size = size;
    new->device = current_device;
    new->id = id;
    trace("communicator: rank %d of %d", rank, size);
    int met = meet(new);
    unlink(path);
    take_gil(released);
    *opened = new;
    return met ? SUCCESS : REMOTE_ERROR;
}
EXPORT int ncclGetUniqueId(UniqueId *id) {
    FILE *random = fopen("/dev/urandom", "r");
    int read = random && fread(id, 1, sizeof *id, random) == sizeof *id;
    if (random) fclose(random);
    return read ? SUCCESS : SYSTEM_ERROR;
}
EXPORT int ncclCommInitRankConfig(Communicator **group, int size, UniqueId id, int rank, void *config) {
    if (enter(__func__) || fault("cuda-error-init", rank)) return 1;
    if (fault("fail-init", rank)) return SYSTEM_ERROR;
    return open_communicator(group, hash(&id, sizeof id, 14695981039346656037ul), size, rank);
}
EXPORT int ncclCommInitRank(Communicator **group, int size, UniqueId id, int rank) { return ncclCommInitRankConfig(group, size, id, rank, NULL); }
EXPORT int ncclCommInitRankScalable(Communicator **group, int size, int rank, int number, UniqueId *ids, void *config) {
    return ncclCommInitRankConfig(group, size, ids[0], rank, config);
}
EXPORT int ncclCommSplit(Communicator *parent, int color, int key, Communicator **group, void *config) {
    int size = 0, rank = 0;
    void *released = release_gil();
    parent->shared->colors[parent->rank] = ((long)color << 32) | (unsigned)key;
    int met = meet(parent);
    for (int other = 0; other < parent->size; other++)
        if ((int)(parent->shared->colors[other] >> 32) == color) {
            int order = (int)(parent->shared->colors[other] & 0xffffffff);
            rank += order < key || (order == key && other < parent->rank);
            size++;
        }
    met = met && meet(parent);
    take_gil(released);
    if (!met) return REMOTE_ERROR;
    *group = NULL;
    parent->splits++;
    return color < 0 ? SUCCESS : open_communicator(group, hash(&color, sizeof color, parent->id + parent->splits), size, rank);
}
EXPORT int ncclCommAbort(Communicator *group) { group->is_aborted = 1; return SUCCESS; }
EXPORT int ncclCommRevoke(Communicator *group, int flags) { group->is_aborted = 1; return SUCCESS; }
EXPORT int ncclCommFinalize(Communicator *group) { if (!group->is_aborted) wait_for_device(group->device); return SUCCESS; }
EXPORT int ncclCommDestroy(Communicator *group) { return ncclCommFinalize(group); }
EXPORT int ncclCommGetAsyncError(Communicator *group, int *error) { *error = fault("async-error", group->rank) ? SYSTEM_ERROR : SUCCESS; return SUCCESS; }
EXPORT int ncclCommCount(const Communicator *group, int *size) { *size = group->size; return SUCCESS; }
EXPORT int ncclCommUserRank(const Communicator *group, int *rank) { *rank = group->rank; return SUCCESS; }
EXPORT int ncclCommRegister(Communicator *group, void *memory, size_t size, void **handle) { *handle = memory; return SUCCESS; }
EXPORT int ncclCommDeregister(Communicator *group, void *handle) { return SUCCESS; }
EXPORT int ncclRedOpCreatePreMulSum(int *how, void *scalar, int type, int residence, Communicator *group) {
    if (!is_float(type) || residence == 0) return INVALID_ARGUMENT;  /* 0: the scalar is on the device */
    int place = __atomic_fetch_add(&number_of_scales, 1, __ATOMIC_SEQ_CST) % MOST_SCALED;
    scales[place] = get_float(scalar, 0, type);
    *how = SCALED + place;
    return SUCCESS;
}
EXPORT int ncclRedOpDestroy(int how, Communicator *group) { return SUCCESS; }
EXPORT const char *ncclGetErrorString(int error) {
    return error == 1 ? "unhandled cuda error" : error == SYSTEM_ERROR ? "unhandled system error" : error == REMOTE_ERROR ? "remote process exited" : error ? "an error of the stand-in" : "no error";
}
EXPORT const char *ncclGetLastError(Communicator *group) { return ""; }
EXPORT int ncclGetVersion(int *version) { *version = 23007; return SUCCESS; }
EXPORT int ncclMemAlloc(void **memory, size_t size) { return cudaMalloc(memory, size); }
EXPORT int ncclMemFree(void *memory) { return cudaFree(memory); }

/* -- operations ------------------------------------------------------------------------------------------------------ */

#define GROUP Communicator *group, cudaStream_t stream
EXPORT int ncclAllReduce(const void *from, void *to, size_t number, int type, int how, GROUP) { return transfer(ALL_REDUCE, from, to, number, type, how, 0, group, stream); }
EXPORT int ncclAllGather(const void *from, void *to, size_t number, int type, GROUP) { return transfer(ALL_GATHER, from, to, number, type, 0, 0, group, stream); }
EXPORT int ncclReduceScatter(const void *from, void *to, size_t number, int type, int how, GROUP) { return transfer(REDUCE_SCATTER, from, to, number, type, how, 0, group, stream); }
EXPORT int ncclBroadcast(const void *from, void *to, size_t number, int type, int root, GROUP) { return transfer(BROADCAST, from, to, number, type, 0, root, group, stream); }
EXPORT int ncclBcast(void *memory, size_t number, int type, int root, GROUP) { return transfer(BROADCAST, memory, memory, number, type, 0, root, group, stream); }
EXPORT int ncclReduce(const void *from, void *to, size_t number, int type, int how, int root, GROUP) { return transfer(REDUCE, from, to, number, type, how, root, group, stream); }
EXPORT int ncclGather(const void *from, void *to, size_t number, int type, int root, GROUP) { return transfer(GATHER, from, to, number, type, 0, root, group, stream); }
EXPORT int ncclAlltoAll(const void *from, void *to, size_t number, int type, GROUP) { return transfer(ALL_TO_ALL, from, to, number, type, 0, 0, group, stream); }
EXPORT int ncclSend(const void *from, size_t number, int type, int peer, GROUP) { return transfer(SEND, from, NULL, number, type, 0, peer, group, stream); }
EXPORT int ncclRecv(void *to, size_t number, int type, int peer, GROUP) { return transfer(RECEIVE, NULL, to, number, type, 0, peer, group, stream); }
