"""Everything raykv raises on purpose.

::

    RaykvError
    ├── ConfigError            a setting is unknown, impossible or contradicts another
    ├── RequestError           a request cannot be served as asked
    ├── DoubleFreeError        a block was given back twice
    ├── IntegrityError         raykv's own books do not balance: a bug, please report it
    ├── NotSupportedError      a valid wish that this version does not fulfil
    ├── RankUnavailableError   a rank died, froze or was closed
    ├── TransferError          a copy between tiers failed or came up short
    └── StoreError             the KV store behind the host tier failed

The first two are ValueErrors as well. A full pool is no error: ``allocate`` answers ``None`` or
``False``. Each message states the cause, the numbers and the remedy. All of them pickle, so they
cross Ray unchanged.
"""


class RaykvError(Exception):
    """Base of all errors that raykv raises on purpose."""


class ConfigError(RaykvError, ValueError):
    """A setting is unknown, impossible, or contradicts another one."""


class RequestError(RaykvError, ValueError):
    """A request cannot be served as asked; other requests are not affected."""


class DoubleFreeError(RaykvError):
    """A block or handle was given back twice; the counts were not changed."""


class IntegrityError(RaykvError):
    """The books of a manager do not balance, which is a bug in raykv."""


class NotSupportedError(RaykvError):
    """A valid wish that this version of raykv does not fulfil."""


class RankUnavailableError(RaykvError):
    """A rank is dead, silent or closed, or the pool was closed."""


class TransferError(RaykvError):
    """A copy of blocks failed or came up short; the data must be recomputed."""


class StoreError(RaykvError):
    """The KV store behind the host tier failed."""
