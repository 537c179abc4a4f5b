from prefgrpo.arguments import PairwiseJudge as PairwiseJudge
from prefgrpo.config.recipe import ConfigError as ConfigError
from prefgrpo.ending import Result as Result
from prefgrpo.ending import TrainingStopped as TrainingStopped
from prefgrpo.trainer import Trainer as Trainer

__version__: str
