/* The numbers that this extension shares with Python: offsets in the recorder, and codes of a row.

   `layout_numbers` hands them to Python by name. worker/hooks/native_writer.py compares each of them with
   core/recorder/layout.py, core/frames.py and core/values.py before it makes a FrameWriter: a build that is left over from
   another version would write numbers to wrong places. */

#ifndef GPUWATCH_LAYOUT_H
#define GPUWATCH_LAYOUT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define EACH_NUMBER(DO)                                                                                      \
    /* sizes in bytes, entries per segment, and where its tables begin */                                    \
    DO(SEGMENT_BYTES, 16384) DO(SEGMENT_HEADER, 256) DO(FRAME_BYTES, 32) DO(ROW_BYTES, 16) DO(VALUE_BYTES, 24) \
    DO(FRAMES_PER_SEGMENT, 128) DO(ROWS_PER_SEGMENT, 384) DO(VALUES_PER_SEGMENT, 240)                        \
    DO(ROWS_AT, SEGMENT_HEADER + FRAMES_PER_SEGMENT * FRAME_BYTES)                                           \
    DO(VALUES_AT, ROWS_AT + ROWS_PER_SEGMENT * ROW_BYTES)                                                    \
    /* integers of a segment's header, by position */                                                        \
    DO(S_PAGE, 1) DO(S_BATCH, 3) DO(S_FRAMES, 6) DO(S_ROWS, 7) DO(S_VALUES, 8)                               \
    DO(S_FRAME_BASE, 9) DO(S_VALUE_BASE, 10)                                                                 \
    /* integers of the file's header, by position, and what the rank is doing */                             \
    DO(F_PHASE, 16) DO(F_MODULE, 21) DO(F_WAITED_NS, 38) DO(RANK_BACKWARD, 0x5D3B6E17)                                \
    /* where a frame holds what, in bytes; its module and parent come first */                               \
    DO(FRAME_DEPTH, 8) DO(FRAME_PHASE, 10) DO(FRAME_COLLECTIVES, 11) DO(FRAME_SEQ, 12) DO(FRAME_ROWS, 20)    \
    /* where a row holds what; its slot, value and shape come first */                                       \
    DO(ROW_DTYPE, 12) DO(ROW_KIND, 13) DO(ROW_MARK, 14)                                                      \
    /* codes */                                                                                              \
    DO(PHASE_BACKWARD, 1) DO(PHASE_OPTIMIZER, 3)                                                             \
    DO(KIND_MEASURED, 0) DO(KIND_NONE, 1) DO(KIND_NOT_A_TENSOR, 2) DO(KIND_NOT_MEASURABLE, 3) DO(KIND_EMPTY, 4) \
    DO(MARK_SCALED, 4) DO(MARK_REHEARSED, 32) DO(ENCODING_INTEGER, 0) DO(VALUE_PENDING, 0xFF00)                                                                                       \
    /* zeros and subnormals are counted in one batch of COUNT_EVERY */                                       \
    DO(COUNT_EVERY, 10)                                                                                      \
    /* the table of process groups: sizes in bytes, and integers of a slot, by position */                   \
    DO(GROUPS_AT, 4096) DO(GROUPS, 32) DO(GROUP_BYTES, 640) DO(RECENT, 8) DO(RECENT_AT, 128) DO(OPERATION_BYTES, 40) \
    DO(G_BEGUN, 1) DO(G_STATE, 2) DO(G_AT, 3) DO(G_SINCE_NS, 4) DO(G_ENDED, 5)                               \
    DO(G_P2P, 6) DO(G_P2P_WHAT, 7) DO(G_P2P_ELEMENTS, 8) DO(G_COUNTED, 10) DO(G_AFTER, 11)                                   \
    DO(GROUP_ISSUING, 1) DO(GROUP_WAITING, 2) DO(GROUP_FAILED, 3) DO(GROUP_ISSUED, 4) DO(GROUP_ON_DEVICE, 5)                                            \
    /* kinds of replaced methods of a process group */                                                       \
    DO(CALL_COLLECTIVE, 0) DO(CALL_P2P, 1) DO(CALL_BARRIER, 2) DO(CALL_WAIT, 3) DO(CALL_BLOCK, 4)

#define AS_CONSTANT(NAME, NUMBER) NAME = NUMBER,
enum { EACH_NUMBER(AS_CONSTANT) };

/* No parent, no value, no shape. */
#define NOTHING 0xFFFFFFFFu

/* name, code of the dtype, encoding, bits of inf, and DLPack's code and bits */
#define EACH_FLOAT(DO)                                  \
    DO(FLOAT32, 1, 2, 0x7F800000, 2, 32)                \
    DO(FLOAT16, 2, 3, 0x7C00, 2, 16)                    \
    DO(BFLOAT16, 3, 4, 0x7F80, 4, 16)                   \
    DO(FLOAT64, 4, 1, 0x7FF0000000000000, 2, 64)

/* The other dtypes: name, code, and DLPack's code and bits. Those after BOOL are read by a device's reader only. */
#define EACH_OTHER(DO)                                                                                        \
    DO(INT64, 5, 0, 64) DO(INT32, 6, 0, 32) DO(INT16, 7, 0, 16) DO(INT8, 8, 0, 8) DO(UINT8, 9, 1, 8)            \
    DO(BOOL, 10, 6, 8) DO(COMPLEX64, 11, 5, 64) DO(COMPLEX128, 12, 5, 128) DO(COMPLEX32, 13, 5, 32)             \
    DO(FLOAT8_E4M3FN, 14, 10, 8) DO(FLOAT8_E5M2, 15, 12, 8) DO(FLOAT8_E4M3FNUZ, 16, 11, 8)                      \
    DO(FLOAT8_E5M2FNUZ, 17, 13, 8) DO(FLOAT8_E8M0FNU, 18, 14, 8)                                                \
    DO(UINT16, 19, 1, 16) DO(UINT32, 20, 1, 32) DO(UINT64, 21, 1, 64)

#define AS_FLOAT(NAME, CODE, ENCODING, INF, TYPE, BITS) DTYPE_##NAME = CODE,
enum { EACH_FLOAT(AS_FLOAT) FLOATS_END };
#define AS_OTHER(NAME, CODE, TYPE, BITS) DTYPE_##NAME = CODE,
enum { EACH_OTHER(AS_OTHER) };

/* dtype code -> the bits of inf, its encoding, and its size */
extern const int64_t inf_bits[FLOATS_END], encodings[FLOATS_END];
extern const long float_bytes[FLOATS_END];

/* Write a number that another process reads. A process that sees it also sees all that was stored before it: so a count is
   published after its entries, and no reader finds an entry that is half written. Without release order the compiler may
   store the count first, and so may a processor of ARM. An aligned integer of 64 bits is written in one piece. */
static inline void publish(int64_t *place, int64_t number)
{
    __atomic_store_n(place, number, __ATOMIC_RELEASE);
}

/* {name: number} of all of the above. NULL with an exception set. */
PyObject *layout_numbers(void);

#endif
