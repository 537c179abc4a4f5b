from prefgrpo.config.recipe import ConfigError as ConfigError
from prefgrpo.run.arguments import PairwiseJudge as PairwiseJudge
from prefgrpo.run.ending import Result as Result
from prefgrpo.run.ending import TrainingStopped as TrainingStopped
from prefgrpo.trainer import Trainer as Trainer

__version__: str
