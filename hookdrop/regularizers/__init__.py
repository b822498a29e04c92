"""The regularizers. Each one is a pure function and a module, which can also be used as an ordinary layer."""

from hookdrop.regularizers.adapters import ForeignFunction as ForeignFunction
from hookdrop.regularizers.adapters import ForeignModule as ForeignModule
from hookdrop.regularizers.adapters import as_regularizer as as_regularizer
from hookdrop.regularizers.adapters import check_picklable as check_picklable
from hookdrop.regularizers.base import Rate as Rate
from hookdrop.regularizers.base import Regularizer as Regularizer
from hookdrop.regularizers.base import at_rate as at_rate
from hookdrop.regularizers.base import drops_elements as drops_elements
from hookdrop.regularizers.base import rate_of as rate_of
from hookdrop.regularizers.base import rows_alone as rows_alone
from hookdrop.regularizers.catalog import *
from hookdrop.regularizers.catalog import REGULARIZERS as REGULARIZERS
