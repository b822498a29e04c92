"""The regularizers: each as a pure function and as a module that also works as a plain layer."""

from hookdrop.regularizers.adapters import ForeignFunction as ForeignFunction
from hookdrop.regularizers.adapters import ForeignModule as ForeignModule
from hookdrop.regularizers.adapters import as_regularizer as as_regularizer
from hookdrop.regularizers.adapters import must_pickle as must_pickle
from hookdrop.regularizers.base import Regularizer as Regularizer
from hookdrop.regularizers.catalog import *
from hookdrop.regularizers.catalog import REGULARIZERS as REGULARIZERS
from hookdrop.regularizers.catalog import parse as parse
