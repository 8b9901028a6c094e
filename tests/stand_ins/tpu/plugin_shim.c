/* Gives torch_tpu XLA's plugin for CPUs in place of libtpu.

   PJRT_CPU_PLUGIN is the path of that plugin. The two take the same calls (PJRT's C API), but the plugin
   refuses options of a client that it does not know, and torch_tpu names some that only libtpu knows. So the
   table of calls is handed on as it is, but for the one that makes a client: it gets no options. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct client_args { /* the beginning of PJRT_Client_Create_Args */
    size_t struct_size;
    void *extension_start;
    const void *options;
    size_t num_options;
};

typedef void *(*client_create)(struct client_args *);

/* The table begins with its size, a pointer and a version (a size, a pointer, two ints); calls follow. */
enum { TABLE_BYTES = 8192, FIRST_CALL = 2 * sizeof(void *) + 2 * sizeof(void *) + 2 * sizeof(int), CLIENT_CREATE = 10 };

static _Alignas(16) unsigned char table[TABLE_BYTES];
static client_create create_of_plugin;

static void *create_without_options(struct client_args *args) {
    const void *options = args->options;
    size_t count = args->num_options;
    args->options = NULL;
    args->num_options = 0;
    void *error = create_of_plugin(args);
    args->options = options;
    args->num_options = count;
    return error;
}

static const void *table_of_plugin(void) {
    const char *path = getenv("PJRT_CPU_PLUGIN");
    void *plugin = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (plugin == NULL) {
        fprintf(stderr, "PJRT_CPU_PLUGIN=%s: %s\n", path == NULL ? "" : path, path == NULL ? "not set" : dlerror());
        abort();
    }
    const void *(*get)(void) = (const void *(*)(void))dlsym(plugin, "GetPjrtApi");
    return get();
}

const void *GetPjrtApi(void) {
    if (create_of_plugin == NULL) {
        const void *given = table_of_plugin();
        size_t bytes = *(const size_t *)given;
        memcpy(table, given, bytes < TABLE_BYTES ? bytes : TABLE_BYTES);
        client_create *slot = (client_create *)(table + FIRST_CALL) + CLIENT_CREATE;
        create_of_plugin = *slot;
        *slot = create_without_options;
    }
    return table;
}
