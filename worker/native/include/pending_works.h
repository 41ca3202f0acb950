/* The works that the script may still wait for: a table of PENDING_WORKS entries, which drops the oldest. */

#ifndef GPUWATCH_PENDING_WORKS_H
#define GPUWATCH_PENDING_WORKS_H

#include "group_types.h"

/* Let go of what a place owns. */
void clear_place(Place *place);

/* The entry of the address of `work`; NULL if there is none. Another work may have had the address before. */
PendingWork *entry_of(GroupWriter *self, PyObject *work);

/* Where `work` can be kept: at an entry of its address, at a free one, at one whose work is gone, or at the oldest one. */
PendingWork *room_for(GroupWriter *self, PyObject *work);

void forget_works(GroupWriter *self);

#endif
