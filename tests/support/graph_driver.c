/* Stands for the CUDA driver where there is none: what tells of a graph's nodes. It knows one graph,
 *
 *     copy -> packed -> memset
 *         \-> plain -/
 *
 * of a copy, two kernels and a memset; one kernel has its arguments packed, and is known by a CUkernel
 * alone, as cuBLAS launches them. The edges from the copy carry data. Structures are those of cuda.h. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { OK, INVALID_VALUE, LOSSY_QUERY = 911 };
enum { KERNEL, MEMCPY, MEMSET };

typedef struct {
    void *func;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    void *kern, *ctx;
} Kernel;

typedef struct {
    uint64_t dst;
    size_t pitch;
    unsigned value, element_size;
    size_t width, height;
} Memset;

typedef struct {
    size_t x, y, z, lod;
    int type;
    const void *host;
    uint64_t device;
    void *array, *reserved;
    size_t pitch, height;
} End;

typedef struct {
    End src, dst;
    size_t width, height, depth;
} Memcpy;

/* Beyond 32 bits, as handles are. */
#define HANDLE(n) ((void *)(0x7f0100000000 + (n)))
#define GRAPH HANDLE(1)
#define STREAM HANDLE(2)
#define EXEC HANDLE(3)
#define FUNCTION HANDLE(4)
#define LIBRARY_KERNEL HANDLE(5)
#define LIBRARY_FUNCTION HANDLE(6)
#define NODE(n) HANDLE(16 + (n))
enum { COPY, PACKED, PLAIN, SET, NODES };

static int32_t count = 7;
static double scale = 2.5;
static void *plain[] = {&count, &scale};
static char buffer[24] = "twenty-four bytes of it";
static size_t buffer_size = sizeof buffer;
static void *packed[] = {(void *)1, buffer, (void *)2, &buffer_size, NULL};

/* What the executable graph's kernels were given last. */
int32_t given_count;
double given_scale;
char given_buffer[24];

int cuGetErrorString(int code, const char **text) { return *text = "as it is", OK; }

int cuGraphGetNodes(void *graph, void **nodes, size_t *number) {
    if (graph != GRAPH) return INVALID_VALUE;
    if (nodes)
        for (size_t i = 0; i < *number && i < NODES; i++) nodes[i] = NODE(i);
    return *number = NODES, OK;
}

int cuGraphNodeGetType(void *node, int *type) {
    if (node == NODE(COPY)) return *type = MEMCPY, OK;
    if (node == NODE(SET)) return *type = MEMSET, OK;
    return node == NODE(PACKED) || node == NODE(PLAIN) ? (*type = KERNEL, OK) : INVALID_VALUE;
}

int cuGraphGetEdges(void *graph, void **from, void **to, size_t *number) { return LOSSY_QUERY; }

int cuGraphGetEdges_v2(void *graph, void **from, void **to, void *data, size_t *number) {
    static const int edges[][2] = {{COPY, PACKED}, {COPY, PLAIN}, {PACKED, SET}, {PLAIN, SET}};
    if (graph != GRAPH) return INVALID_VALUE;
    if (from) {
        if (!data) return LOSSY_QUERY;
        memset(data, 1, 8 * *number);
        for (size_t i = 0; i < *number && i < 4; i++)
            from[i] = NODE(edges[i][0]), to[i] = NODE(edges[i][1]);
    }
    return *number = 4, OK;
}

int cuGraphKernelNodeGetParams_v2(void *node, Kernel *found) {
    Kernel mine = {.grid = {3, 2, 1}, .block = {32, 4, 1}, .shared = 128};
    if (node == NODE(PLAIN))
        mine.func = FUNCTION, mine.params = plain;
    else if (node == NODE(PACKED))
        mine.kern = LIBRARY_KERNEL, mine.extra = packed;
    else
        return INVALID_VALUE;
    return *found = mine, OK;
}

int cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const Kernel *given) {
    if (exec != EXEC || given->grid[0] != 3 || given->block[1] != 4 || given->shared != 128)
        return INVALID_VALUE;
    if (node == NODE(PLAIN)) {
        if (given->func != FUNCTION || given->extra) return INVALID_VALUE;
        given_count = *(int32_t *)given->params[0];
        given_scale = *(double *)given->params[1];
        return OK;
    }
    if (node != NODE(PACKED) || given->kern != LIBRARY_KERNEL || given->params) return INVALID_VALUE;
    void **extra = given->extra;
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4]) return INVALID_VALUE;
    if (*(size_t *)extra[3] != sizeof given_buffer) return INVALID_VALUE;
    return memcpy(given_buffer, extra[1], sizeof given_buffer), OK;
}

int cuFuncGetName(const char **name, void *function) {
    return function == FUNCTION ? (*name = "_Z5plaini", OK) : INVALID_VALUE;
}

int cuKernelGetName(const char **name, void *kernel) {
    return kernel == LIBRARY_KERNEL ? (*name = "gemm_tn", OK) : INVALID_VALUE;
}

int cuKernelGetFunction(void **function, void *kernel) {
    return kernel == LIBRARY_KERNEL ? (*function = LIBRARY_FUNCTION, OK) : INVALID_VALUE;
}

int cuFuncGetAttribute(int *value, int which, void *function) {
    if (function != FUNCTION && function != LIBRARY_FUNCTION) return INVALID_VALUE;
    if (which == 1) return *value = 64, OK; /* static shared memory */
    return which == 4 ? (*value = function == FUNCTION ? 40 : 168, OK) : INVALID_VALUE;
}

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (function != FUNCTION || index > 1) return INVALID_VALUE;
    return *offset = 8 * index, *size = index ? 8 : 4, OK;
}

int cuGraphMemcpyNodeGetParams(void *node, Memcpy *found) {
    Memcpy mine = {.src = {.type = 1, .host = HANDLE(64)}, .dst = {.type = 2, .device = 4096},
                   .width = 100, .height = 3, .depth = 1};
    return node == NODE(COPY) ? (*found = mine, OK) : INVALID_VALUE;
}

int cuGraphMemsetNodeGetParams(void *node, Memset *found) {
    Memset mine = {.dst = 8192, .value = 255, .element_size = 4, .width = 10, .height = 1};
    return node == NODE(SET) ? (*found = mine, OK) : INVALID_VALUE;
}

int cuStreamGetCaptureInfo_v3(void *stream, int *status, uint64_t *id, void **graph,
                              const void ***nodes, const void **data, size_t *number) {
    if (stream != STREAM || !nodes || !data || !number) return INVALID_VALUE;
    return *status = 1, *id = 1, *graph = GRAPH, *number = 0, OK;
}

int cuGraphDebugDotPrint(void *graph, const char *path, unsigned flags) {
    FILE *file = graph == GRAPH && flags == 1 ? fopen(path, "w") : NULL;
    if (!file) return INVALID_VALUE;
    fputs("digraph dot {}\n", file);
    return fclose(file);
}

/* Others that are asked for by name, and not called. */
#define ABSENT(name) \
    int name(void) { return INVALID_VALUE; }
ABSENT(cuGraphExecMemcpyNodeSetParams)
ABSENT(cuGraphNodeSetEnabled)
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxSetCurrent)
ABSENT(cuStreamCreate)
ABSENT(cuMemcpyDtoDAsync_v2)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleUnload)
ABSENT(cuModuleGetFunction)
ABSENT(cuLaunchKernel)
