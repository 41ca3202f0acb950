/* A stand-in for libnvidia-ml.so.1: two H100s, one of them with two MIG devices if told so.
 *
 * $STAND_IN_NVML is a file that is read again at every question. A line is `GPU FACT VALUE`, `GPU FACT error CODE` or
 * `GPU FACT hang`; GPU is 0, 1 or * for both. What no line is about is as on a healthy H100. The facts are the names in
 * the calls of look() below. XIDs are the lines `GPU xid NUMBER [INSTANCE/INSTANCE]`: each is told once.
 *
 * -DOLD leaves out what a driver of 2019 did not have; -DANCIENT even nvmlInitWithFlags.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };

typedef struct { int gpu; int mig; } Device;
static Device devices[2] = {{0, -1}, {1, -1}};
static Device migs[2][2] = {{{0, 0}, {0, 1}}, {{1, 0}, {1, 1}}};
static const char *uuids[2] = {"GPU-00000000-aaaa-bbbb-cccc-000000000000", "GPU-11111111-aaaa-bbbb-cccc-111111111111"};

static void uuid_of(const Device *device, char *text) {
    if (device->mig < 0) strcpy(text, uuids[device->gpu]);
    else sprintf(text, "MIG-%d%d000000-aaaa-bbbb-cccc-000000000000", device->gpu, device->mig);
}

/* The last line of the file that is about this fact; `value` stays as it was if there is none. */
static int look(const Device *device, const char *fact, u64 *value) {
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], gpu[16], name[64], word[64];
    int answer = SUCCESS;
    while (file && fgets(line, sizeof line, file)) {
        int code = 0;
        if (sscanf(line, "%15s %63s %63s %d", gpu, name, word, &code) < 3 || strcmp(name, fact)) continue;
        if (strcmp(gpu, "*") && (!device || atoi(gpu) != device->gpu)) continue;
        if (!strcmp(word, "hang")) for (;;) pause();
        answer = SUCCESS;
        if (!strcmp(word, "error")) answer = code;
        else *value = strtoull(word, NULL, 0);
    }
    if (file) fclose(file);
    return answer;
}

static int look32(const Device *device, const char *fact, u32 *out, u32 healthy) {
    u64 value = healthy;
    int answer = look(device, fact, &value);
    if (answer == SUCCESS) *out = (u32)value;
    return answer;
}

/* -- the library -------------------------------------------------------------------------------------------------- */

static int init(void) { u64 unused = 0; return look(NULL, "init", &unused); }
int nvmlInit_v2(void) { return init(); }
#ifndef ANCIENT
int nvmlInitWithFlags(u32 flags) { (void)flags; return init(); }
#endif
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { snprintf(text, size, "580.95.05"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *text, u32 size) { snprintf(text, size, "13.580.95.05"); return SUCCESS; }

int nvmlDeviceGetCount_v2(u32 *count) { return look32(NULL, "count", count, 2); }
int nvmlDeviceGetHandleByIndex_v2(u32 index, Device **device) {
    u64 unused = 0;
    if (index > 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return look(*device, "handle", &unused);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    char text[96];
    u64 unused = 0;
    for (int gpu = 0; gpu < 2; gpu++) {
        Device *all[3] = {&devices[gpu], &migs[gpu][0], &migs[gpu][1]};
        for (int i = 0; i < 3; i++) {
            uuid_of(all[i], text);
            if (!strcmp(text, uuid)) {
                *device = all[i];
                return look(*device, "handle", &unused);
            }
        }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(Device *device, char *text, u32 size) {
    char found[96];
    uuid_of(device, found);
    snprintf(text, size, "%s", found);
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *text, u32 size) {
    (void)device;
    snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    sprintf(pci->bus_id, "00000000:%02X:00.0", 0x1b + device->gpu);
    return SUCCESS;
}

/* -- facts -------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetEccMode(Device *device, u32 *current, u32 *pending) {
    *pending = 1;
    return look32(device, "ecc_mode", current, 1);
}
int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int life, u64 *count) {
    static const char *names[2][2] = {{"ecc_corrected_volatile", "ecc_corrected_aggregate"},
                                      {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"}};
    *count = 0;
    return look(device, names[kind][life], count);
}
int nvmlDeviceGetTemperature(Device *device, int sensor, u32 *degrees) {
    (void)sensor;
    return look32(device, "temperature", degrees, 41);
}
int nvmlDeviceGetTemperatureThreshold(Device *device, int kind, u32 *degrees) {
    (void)kind;
    return look32(device, "temperature_slowdown", degrees, 92);
}
int nvmlDeviceGetComputeMode(Device *device, u32 *mode) { return look32(device, "compute_mode", mode, 0); }
int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, u32 *out) { return look32(device, "pcie_generation", out, 5); }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, u32 *out) { return look32(device, "pcie_generation_max", out, 5); }
int nvmlDeviceGetCurrPcieLinkWidth(Device *device, u32 *out) { return look32(device, "pcie_width", out, 16); }
int nvmlDeviceGetMaxPcieLinkWidth(Device *device, u32 *out) { return look32(device, "pcie_width_max", out, 16); }
int nvmlDeviceGetPcieReplayCounter(Device *device, u32 *out) { return look32(device, "pcie_replays", out, 0); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, u64 *reasons) {
    static int asked;
    *reasons = 4; /* the power limit, as usual under load */
    int answer = look(device, "clock_reasons", reasons);
    if (answer == SUCCESS && asked++ < 4) answer = look(device, "clock_reasons_at_first", reasons);
    return answer;
}
int nvmlDeviceGetRetiredPages(Device *device, int cause, u32 *count, u64 *addresses) {
    u64 pages = 0;
    int answer = look(device, "no_retirement", &pages); /* an H100 remaps rows */
    if (answer != SUCCESS) return answer;
    answer = look(device, cause ? "retired_pages_uncorrected" : "retired_pages_corrected", &pages);
    if (answer != SUCCESS) return answer;
    if (!addresses) {
        *count = (u32)pages;
        return pages ? INSUFFICIENT_SIZE : SUCCESS;
    }
    for (u64 i = 0; i < pages; i++) addresses[i] = 4096 * i;
    *count = (u32)pages;
    return SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, u32 *pending) {
    u64 unused = 0;
    int answer = look(device, "no_retirement", &unused);
    return answer != SUCCESS ? answer : look32(device, "retired_pages_pending", pending, 0);
}
int nvmlDeviceGetNvLinkState(Device *device, u32 link, u32 *active) {
    u32 down = 0;
    int answer = look32(device, "nvlink_state", &down, 0);
    if (answer != SUCCESS) return answer;
    if (link >= 18) return INVALID_ARGUMENT;
    answer = look32(device, "nvlinks_inactive", &down, 0);
    *active = link >= down;
    return answer;
}
int nvmlDeviceGetNvLinkErrorCounter(Device *device, u32 link, int counter, u64 *count) {
    static const char *names[4] = {"nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_crc_errors", ""};
    *count = 0;
    if (counter > 2) return NOT_SUPPORTED;
    int answer = look(device, "nvlink_counters", count);
    if (answer == SUCCESS) answer = look(device, names[counter], count);
    if (link != 17) *count = 0; /* all of them on the last link */
    return answer;
}
typedef struct { u32 pid; u64 memory; u32 gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, u32 *count, Process *processes) {
    u64 pid = 0;
    int answer = look(device, "process", &pid);
    if (answer != SUCCESS) return answer;
    if (!processes) {
        *count = pid != 0;
        return pid ? INSUFFICIENT_SIZE : SUCCESS;
    }
    *count = 1;
    processes[0] = (Process){(u32)pid, 7ULL << 30, ~0u, ~0u};
    return SUCCESS;
}

typedef struct { u32 gpu, memory; } Use;
int nvmlDeviceGetUtilizationRates(Device *device, Use *use) { return look32(device, "use", &use->gpu, 97); }
typedef struct { u64 total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    memory->total = 80ULL << 30;
    memory->used = 60ULL << 30;
    return look(device, "memory", &memory->used);
}
int nvmlDeviceGetClockInfo(Device *device, int kind, u32 *mhz) {
    return kind == 1 ? look32(device, "sm_clock", mhz, 1980) : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxClockInfo(Device *device, int kind, u32 *mhz) {
    return kind == 1 ? look32(device, "sm_clock_max", mhz, 1980) : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(Device *device, u32 *milliwatts) { return look32(device, "power", milliwatts, 650000); }

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, u64 *reasons) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons);
}
int nvmlDeviceGetRemappedRows(Device *device, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    int answer = look32(device, "remap_corrected", corrected, 0);
    if (answer == SUCCESS) answer = look32(device, "remap_uncorrected", uncorrected, 0);
    if (answer == SUCCESS) answer = look32(device, "remap_pending", pending, 0);
    if (answer == SUCCESS) answer = look32(device, "remap_failed", failed, 0);
    return answer;
}
typedef struct { u32 version; u64 counts[11]; u32 exceeded; } Sram;
int nvmlDeviceGetSramEccErrorStatus(Device *device, Sram *status) {
    return look32(device, "sram_threshold_exceeded", &status->exceeded, 0);
}
typedef struct {
    u32 version; unsigned char cluster[16]; u32 status, clique, state, health; unsigned char summary;
} Fabric;
int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *fabric) {
    if (fabric->version >> 24 > 2) return 25; /* a driver that knows version 2 at most */
    int answer = look32(device, "fabric_state", &fabric->state, 3);
    if (answer == SUCCESS) answer = look32(device, "fabric_status", &fabric->status, 0);
    if (answer == SUCCESS) answer = look32(device, "fabric_health", &fabric->health, 0x1aa); /* all is as it should be */
    return answer;
}
typedef struct { u32 field, scope; long long when, latency; u32 type; int answer; union { u32 small; u64 big; } value; } Field;
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].value.big = 0;
        if (fields[i].field == 230) fields[i].answer = look32(device, "recovery_action", &fields[i].value.small, 0);
        else if (fields[i].field == 91) fields[i].answer = look32(device, "nvlink_count", &fields[i].value.small, 18);
        else if (fields[i].field == 208 || fields[i].field == 211 || fields[i].field == 215) {
            fields[i].type = 3;
            fields[i].answer = look(device, "nvlink5_errors", &fields[i].value.big);
            if (fields[i].scope != 17) fields[i].value.big = 0;
        } else if (fields[i].field == 138 || fields[i].field == 139) { /* NVLink, KiB that were sent and received */
            fields[i].type = 3;
            fields[i].answer = fields[i].scope == ~0u ? look(device, "nvlink_kib", &fields[i].value.big) : NOT_SUPPORTED;
        } else fields[i].answer = NOT_SUPPORTED;
    }
    return SUCCESS;
}
int nvmlDeviceGetMigMode(Device *device, u32 *current, u32 *pending) {
    int answer = look32(device, "mig_mode", current, 0);
    return answer != SUCCESS ? answer : look32(device, "mig_mode_pending", pending, *current);
}
int nvmlDeviceIsMigDeviceHandle(Device *device, u32 *is) { *is = device->mig >= 0; return SUCCESS; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *mig, Device **device) {
    *device = &devices[mig->gpu];
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, u32 *count) { return look32(device, "mig_room", count, 0); }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, u32 index, Device **mig) {
    u32 on = 0;
    look32(device, "mig_mode", &on, 0);
    if (!on || index > 1) return NOT_FOUND;
    *mig = &migs[device->gpu][index];
    return SUCCESS;
}
#endif

/* -- events ------------------------------------------------------------------------------------------------------- */

static int registered[2];
static long told;

int nvmlEventSetCreate(void **set) { static int one; *set = &one; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(Device *device, u64 types, void *set) {
    u64 unused = 0;
    (void)set;
    registered[device->gpu] = types == 8;
    return look(device, "register", &unused);
}
typedef struct { Device *device; u64 type, data; u32 gpu_instance, compute_instance; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, u32 timeout_ms) {
    (void)set;
    for (u32 waited = 0;; waited += 10) {
        u64 unused = 0;
        int answer = look(NULL, "wait", &unused);
        if (answer != SUCCESS) return answer;
        const char *path = getenv("STAND_IN_NVML");
        FILE *file = path ? fopen(path, "r") : NULL;
        char line[256];
        long number = 0;
        while (file && fgets(line, sizeof line, file)) {
            int gpu, xid, fields;
            u32 gpu_instance = ~0u, compute_instance = ~0u;
            fields = sscanf(line, "%d xid %d %u/%u", &gpu, &xid, &gpu_instance, &compute_instance);
            if (fields < 2 || !registered[gpu] || number++ < told) continue;
            told++;
            fclose(file);
            *event = (Event){&devices[gpu], 8, (u64)xid, gpu_instance, compute_instance};
            return SUCCESS;
        }
        if (file) fclose(file);
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(10000);
    }
}
