"""The server that forks the pool's workers, as a copy of the process that runs the tests.

A new process would import torch, transformers and every architecture again, and each worker the modules of its tests.
The copy is made between the collection of the tests and the first test, so that it holds modules only.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import NoReturn
from unittest import mock

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from oslo_models.deploy.process_copy import leave_files


def start_server(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make a copy of this process the fork server of `multiprocessing`.

    If that is impossible, the first worker starts a new process as the server.

    Args:
        preload: modules that the server imports, as far as this process has not.
        environment: variables of the workers.
    """
    if sys.platform != "linux" or torch.cuda.is_available():  # the query initialised the driver; copies cannot use it
        return

    def fork(_executable: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        if (pid := os.fork()) == 0:
            os.environ.update(environment)
            _be_server(command[-1], descriptors)
        return pid

    forkserver.set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()  # otherwise the server would start it first
    with mock.patch.object(util, "spawnv_passfds", fork), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the thread of pytest-xdist only waits
        forkserver.ensure_running()


def _be_server(code: str, descriptors: Sequence[int]) -> NoReturn:
    """Run the code of a new server after removing all state of pytest except modules."""
    try:
        gc.disable()
        leave_files({0, 1, 2, *descriptors})
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.getLogger().handlers.clear()
        get_checkpoint_conversion_mapping("llama")  # makes the mappings of all model types, in 45 ms
        forkserver._forkserver.__init__()  # its lock was held at the fork
        exec(code)
    except Exception:  # noqa: BLE001  its clients would only see that the connection is closed
        traceback.print_exc()
    finally:
        os._exit(0)  # without the exit handlers of the original process
