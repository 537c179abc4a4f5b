from prefgrpo.commands.train import PairwiseJudge as PairwiseJudge
from prefgrpo.commands.train import Result as Result
from prefgrpo.commands.train import Trainer as Trainer
from prefgrpo.config.recipe import ConfigError as ConfigError
from prefgrpo.run.trainer import TrainingStopped as TrainingStopped

__version__: str
