"""The training engine on Megatron-Core: the only package that imports megatron."""

from fivefold.mcore.first_import import import_megatron

import_megatron()
