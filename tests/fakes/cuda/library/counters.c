/* Exact counts of what this process has asked of its devices. */
#include "stand_in.h"

static long counts[COUNTERS];
static const char *names[COUNTERS] = {
    "launches", "operations", "copies", "pageable_copies", "fills", "host_waits", "queries", "events", "records",
    "device_allocations", "host_allocations", "registrations", "collectives", "graph_launches", "refused",
};

void count(enum Counter counter) { __atomic_fetch_add(&counts[counter], 1, __ATOMIC_SEQ_CST); }

EXPORT long stand_in_count(int counter) {
    return counter < 0 || counter >= COUNTERS ? -1 : __atomic_load_n(&counts[counter], __ATOMIC_SEQ_CST);
}
EXPORT const char *stand_in_counter_name(int counter) { return counter < 0 || counter >= COUNTERS ? NULL : names[counter]; }
