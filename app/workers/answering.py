"""The application of a worker: the routes of `/v1` that need only the engines, behind what the home decides."""

from __future__ import annotations

from fastapi import FastAPI

from app import errors, openai
from app.around import surround
from app.config import Settings
from app.drain import Drain, Draining
from app.manner import Manners
from app.metrics import Goals
from app.models import Models
from app.state import Serving
from app.workers.asking import AskHome
from app.workers.counting import Telling
from app.workers.link import HomeLink


def create_worker_app(models: Models, settings: Settings, home: HomeLink) -> FastAPI:
    """The application of one worker, which talks to its home over `home`."""
    telling = Telling(Goals.of_settings(settings), home.say)
    if models.auto is not None:
        models.auto.hear = lambda model, given: telling.at_once().routed.append((model, given))
    app = FastAPI(title="Ponder", openapi_url=None, docs_url=None, redoc_url=None)
    serving = Serving(settings, models, telling, Manners.of_settings(settings), Drain())
    serving.attach(app)
    errors.install(app, lambda error: telling.at_once().errors.append(error.code or str(error.status)))
    app.include_router(openai.router)
    app.add_middleware(AskHome, settings=settings, telling=telling, ask=home.ask)
    app.add_middleware(Draining, drain=serving.drain)
    surround(app, settings)
    return app
