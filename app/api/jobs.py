"""The routes of ingest jobs: how far they have come, file by file, and their end."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from app.api.documents import job_shown
from app.api.query import parameters
from app.api.shown import JobShown, JobSummary
from app.state import State
from app.users import User

router = APIRouter(prefix="/api", tags=["Documents"])

MOST_JOBS = 100  # in the list


@router.get("/jobs")
async def jobs(request: Request, user: User) -> dict[str, list[JobSummary]]:
    parameters(request)
    library = State.of(request).library

    def newest() -> list[JobSummary]:
        return [job_shown(library, user, job).summary() for job in library.ingest.jobs.of(user)[:MOST_JOBS]]

    return {"jobs": await asyncio.to_thread(newest)}


@router.get("/jobs/{job_id}")
async def job(request: Request, user: User, job_id: str) -> JobShown:
    return await asyncio.to_thread(job_shown, State.of(request).library, user, job_id)


@router.post("/jobs/{job_id}/cancel")
async def cancel(request: Request, user: User, job_id: str) -> JSONResponse:
    await asyncio.to_thread(State.of(request).library.ingest.cancel, user, job_id)
    return JSONResponse({"id": job_id}, 202)
