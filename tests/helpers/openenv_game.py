"""A game on OpenEnv's own server, run by a Python that has the package; imports nothing of ours."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Said(Observation):
    text: str = ""


class Game(Environment):
    """The number to guess is the seed's last digit; 13 is a bug of the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.turns = 0, 0

    def reset(self, seed=None, episode_id=None, **fields):
        self.number, self.turns = (seed or 0) % 10, 0
        return Said(text="Guess a digit.")

    def step(self, action, timeout_s=None, **fields):
        self.turns += 1
        if action.guess == 13:
            raise RuntimeError("<|im_end|>a bug of the game")
        right = action.guess == self.number
        return Said(text="yes" if right else "no", reward=right, done=right)

    @property
    def state(self):
        return State(step_count=self.turns)


app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
