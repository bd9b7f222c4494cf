"""The kernels at the two ends of an iteration, as PTX: what `loop_cpu` says in Python.

They are PTX and not CUDA C because the driver then needs no compiler and no device runtime library: it resolves
`cudaGraphSetConditional` itself. Both are written for a single block.

Memory order (PTX ISA, "Memory Consistency Model"). The block copies the record to pinned memory and meets at a
barrier; then its first thread fences at system scope, which covers what the barrier ordered before it, and writes the
counters. So a reader that sees a counter sees the record. The same fence stands between reading how far the CPU has
read and any later record, so a place is not rewritten before it was read. The reason for the end is a release of its
own: who sees it sees the last counters too.
"""

from __future__ import annotations

from mainspring.graphs.loop_layout import REASONS, Slot, State, Words

__all__ = ["BEGIN", "END_ITERATION", "PTX"]

BEGIN = "mainspring_loop_begin"
"""Entry with parameters u64 words, state, handle, depth (0: no records). One thread; sets the condition."""

END_ITERATION = "mainspring_loop_end_iteration"
"""Entry with the same parameters, then u64 ring, record, int32 words in a record, flag. Any number of threads."""

_DEFINES = {
    "WRITTEN": 8 * Words.WRITTEN,
    "DOORBELL": 8 * Words.DOORBELL,
    "READ": 8 * Words.READ,
    "SLOTS": 8 * Words.SLOTS,
    "SLOT_MASK": Words.LAUNCHES - 1,
    "SLOT_BYTES": 8 * Words.SLOT_WORDS,
    "STAMPS_AT": 8 * Words.STAMPS_AT,
    "STAMP_MASK": Words.STAMPS - 1,
    "NUMBER": 8 * Slot.NUMBER,
    "MAX_STEPS": 8 * Slot.MAX_STEPS,
    "ITERATIONS": 8 * Slot.ITERATIONS,
    "REASON": 8 * Slot.REASON,
    "FIRST": 8 * Slot.FIRST,
    "STARTED": 8 * Slot.STARTED,
    "S_LAUNCH": 8 * State.LAUNCH,
    "S_ITERATIONS": 8 * State.ITERATIONS,
    "S_TOTAL": 8 * State.TOTAL,
    "S_WRITTEN": 8 * State.WRITTEN,
    "S_MAX_STEPS": 8 * State.MAX_STEPS,
    "FLAG": REASONS.index("flag"),
    "RANG": REASONS.index("doorbell"),
    "ENOUGH": REASONS.index("max_steps"),
    "FULL": REASONS.index("ring_full"),
    "LOST": REASONS.index("lost"),
}

_SOURCE = """
.version 7.0
.target sm_75
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry {begin} (
    .param .u64 p_words, .param .u64 p_state, .param .u64 p_handle, .param .u64 p_depth
)
{{
    .reg .pred %p<8>;
    .reg .b32 %go;
    .reg .b64 %words, %state, %handle, %depth, %launch, %slot, %number, %max, %total, %now;
    .reg .b64 %doorbell, %read, %written, %unread, %reason, %zero;

    ld.param.u64 %words, [p_words];
    ld.param.u64 %state, [p_state];
    ld.param.u64 %handle, [p_handle];
    ld.param.u64 %depth, [p_depth];
    mov.u64 %zero, 0;

    // The next launch, and its slot.
    ld.u64 %launch, [%state+$S_LAUNCH];
    add.u64 %launch, %launch, 1;
    and.b64 %slot, %launch, $SLOT_MASK;
    mul.lo.u64 %slot, %slot, $SLOT_BYTES;
    add.u64 %slot, %slot, %words;
    add.u64 %slot, %slot, $SLOTS;
    ld.relaxed.sys.u64 %number, [%slot+$NUMBER];
    ld.relaxed.sys.u64 %max, [%slot+$MAX_STEPS];
    ld.relaxed.sys.u64 %doorbell, [%words+$DOORBELL];
    ld.relaxed.sys.u64 %read, [%words+$READ];
    ld.u64 %total, [%state+$S_TOTAL];
    ld.u64 %written, [%state+$S_WRITTEN];
    mov.u64 %now, %globaltimer;
    fence.acq_rel.sys;
    st.u64 [%state+$S_LAUNCH], %launch;
    st.u64 [%state+$S_ITERATIONS], %zero;
    st.u64 [%state+$S_MAX_STEPS], %max;
    st.relaxed.sys.u64 [%slot+$FIRST], %total;
    st.relaxed.sys.u64 [%slot+$STARTED], %now;

    // Why it is over already, the weakest reason first.
    mov.u64 %reason, 0;
    sub.u64 %unread, %written, %read;
    setp.ge.u64 %p0, %unread, %depth;
    setp.ne.and.u64 %p1, %depth, 0, %p0;
    @%p1 mov.u64 %reason, $FULL;
    setp.ge.u64 %p2, %doorbell, %launch;
    @%p2 mov.u64 %reason, $RANG;
    setp.ne.u64 %p3, %number, %launch;
    @%p3 mov.u64 %reason, $LOST;
    setp.ne.u64 %p4, %reason, 0;
    @%p4 st.release.sys.u64 [%slot+$REASON], %reason;
    selp.u32 %go, 0, 1, %p4;
    {{
        .param .b64 handle;
        .param .b32 value;
        st.param.b64 [handle], %handle;
        st.param.b32 [value], %go;
        call cudaGraphSetConditional, (handle, value);
    }}
    ret;
}}

.visible .entry {end_iteration} (
    .param .u64 p_words, .param .u64 p_state, .param .u64 p_handle, .param .u64 p_depth,
    .param .u64 p_ring, .param .u64 p_record, .param .u64 p_count, .param .u64 p_flag
)
{{
    .reg .pred %p<12>;
    .reg .b32 %thread, %threads, %word, %flag, %go;
    .reg .b64 %words, %state, %handle, %depth, %ring, %record, %count, %flag_at, %i, %step, %from, %to;
    .reg .b64 %launch, %slot, %iterations, %max, %total, %written, %now, %stamp;
    .reg .b64 %doorbell, %read, %unread, %reason;

    ld.param.u64 %words, [p_words];
    ld.param.u64 %state, [p_state];
    ld.param.u64 %handle, [p_handle];
    ld.param.u64 %depth, [p_depth];
    ld.param.u64 %ring, [p_ring];
    ld.param.u64 %record, [p_record];
    ld.param.u64 %count, [p_count];
    ld.param.u64 %flag_at, [p_flag];
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    ld.u64 %written, [%state+$S_WRITTEN];

    // The record, word by word, into its place in the ring.
    setp.eq.u64 %p0, %depth, 0;
    @%p0 bra COPIED;
    rem.u64 %to, %written, %depth;
    mul.lo.u64 %to, %to, %count;
    shl.b64 %to, %to, 2;
    add.u64 %to, %to, %ring;
    cvt.u64.u32 %i, %thread;
    cvt.u64.u32 %step, %threads;
    shl.b64 %from, %i, 2;
    add.u64 %to, %to, %from;
    add.u64 %from, %from, %record;
    shl.b64 %stamp, %step, 2;
COPY:
    setp.ge.u64 %p1, %i, %count;
    @%p1 bra COPIED;
    ld.b32 %word, [%from];
    st.b32 [%to], %word;
    add.u64 %from, %from, %stamp;
    add.u64 %to, %to, %stamp;
    add.u64 %i, %i, %step;
    bra COPY;
COPIED:
    bar.sync 0;
    setp.ne.u32 %p2, %thread, 0;
    @%p2 bra DONE;

    ld.relaxed.sys.u64 %doorbell, [%words+$DOORBELL];
    ld.relaxed.sys.u64 %read, [%words+$READ];
    ld.volatile.u32 %flag, [%flag_at];
    ld.u64 %launch, [%state+$S_LAUNCH];
    ld.u64 %iterations, [%state+$S_ITERATIONS];
    ld.u64 %total, [%state+$S_TOTAL];
    ld.u64 %max, [%state+$S_MAX_STEPS];
    mov.u64 %now, %globaltimer;

    and.b64 %stamp, %total, $STAMP_MASK;
    shl.b64 %stamp, %stamp, 3;
    add.u64 %stamp, %stamp, %words;
    st.u64 [%stamp+$STAMPS_AT], %now;
    add.u64 %total, %total, 1;
    add.u64 %iterations, %iterations, 1;
    setp.ne.u64 %p3, %depth, 0;
    @%p3 add.u64 %written, %written, 1;
    st.u64 [%state+$S_TOTAL], %total;
    st.u64 [%state+$S_ITERATIONS], %iterations;
    st.u64 [%state+$S_WRITTEN], %written;

    and.b64 %slot, %launch, $SLOT_MASK;
    mul.lo.u64 %slot, %slot, $SLOT_BYTES;
    add.u64 %slot, %slot, %words;
    add.u64 %slot, %slot, $SLOTS;
    fence.acq_rel.sys;
    st.relaxed.sys.u64 [%words+$WRITTEN], %written;
    st.relaxed.sys.u64 [%slot+$ITERATIONS], %iterations;

    // Why it is over, the weakest reason first.
    mov.u64 %reason, 0;
    sub.u64 %unread, %written, %read;
    setp.ge.u64 %p4, %unread, %depth;
    and.pred %p4, %p4, %p3;
    @%p4 mov.u64 %reason, $FULL;
    setp.ge.u64 %p5, %iterations, %max;
    @%p5 mov.u64 %reason, $ENOUGH;
    setp.ge.u64 %p6, %doorbell, %launch;
    @%p6 mov.u64 %reason, $RANG;
    setp.eq.u32 %p7, %flag, 0;
    @%p7 mov.u64 %reason, $FLAG;
    setp.ne.u64 %p8, %reason, 0;
    @%p8 st.release.sys.u64 [%slot+$REASON], %reason;
    selp.u32 %go, 0, 1, %p8;
    {{
        .param .b64 handle;
        .param .b32 value;
        st.param.b64 [handle], %handle;
        st.param.b32 [value], %go;
        call cudaGraphSetConditional, (handle, value);
    }}
DONE:
    ret;
}}
"""


def _ptx() -> str:
    text = _SOURCE.format(begin=BEGIN, end_iteration=END_ITERATION)
    for name in sorted(_DEFINES, key=len, reverse=True):
        text = text.replace(f"${name}", str(_DEFINES[name]))
    return text.lstrip()


PTX = _ptx()
"""Both entries; for any NVIDIA device from compute capability 7.5 on."""
