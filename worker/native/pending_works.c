/* The works that the script may still wait for, by a hash of their addresses. */

#include "pending_works.h"

#include "objects.h"

void clear_place(Place *place)
{
    Py_CLEAR(place->outputs);
    Py_CLEAR(place->given_late);
}

void forget_works(GroupWriter *self)
{
    for (int i = 0; i < PENDING_WORKS; i++) {
        self->pending[i].work = NULL;
        Py_CLEAR(self->pending[i].ref);
        clear_place(&self->pending[i].place);
    }
}

static PendingWork *probe(GroupWriter *self, PyObject *work, int step)
{
    const uint64_t hash = ((uint64_t)(uintptr_t)work >> 4) * UINT64_C(0x9E3779B97F4A7C15);
    return &self->pending[((hash >> 48) + (uint64_t)step) % PENDING_WORKS];
}

PendingWork *entry_of(GroupWriter *self, PyObject *work)
{
    for (int step = 0; step < PROBES; step++)
        if (probe(self, work, step)->work == work)
            return probe(self, work, step);
    return NULL;
}

PendingWork *room_for(GroupWriter *self, PyObject *work)
{
    PendingWork *best = entry_of(self, work);
    for (int step = 0; step < PROBES && best == NULL; step++)
        if (probe(self, work, step)->work == NULL || !is_alive(probe(self, work, step)->ref))
            best = probe(self, work, step);
    for (int step = 0; step < PROBES && best == NULL; step++)
        if (step == PROBES - 1 || probe(self, work, step)->place.number < probe(self, work, step + 1)->place.number)
            best = probe(self, work, step);
    return best;
}
