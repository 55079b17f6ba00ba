"""Free ports and socket paths for new processes, from the benchmarks."""

from benchmarks.free_port import free_port as free_port
from benchmarks.short_paths import short_path as short_path
from benchmarks.short_paths import shorten_socket_paths as shorten_socket_paths
