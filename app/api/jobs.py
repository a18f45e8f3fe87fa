"""Routes of ingestion jobs."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from app.api.response_models import JobShown, JobSummary
from app.current_user import AppState, User
from app.query_params import ONLY_KNOWN
from retrieval import Library

router = APIRouter(prefix="/api", tags=["Documents"], dependencies=[ONLY_KNOWN])

MAX_JOBS = 100  # in the list


def job_shown(library: Library, user: str, job: str) -> JobShown:
    """
    Raises:
        NotFound: the user has no such job.
    """
    return JobShown.of(library.ingest.jobs.get(job, user), library.ingest.stalled(job))


@router.get("/jobs")
async def jobs(user: User, state: AppState) -> dict[str, list[JobSummary]]:
    library = state.library

    def newest() -> list[JobSummary]:
        return [job_shown(library, user, job).summary() for job in library.ingest.jobs.of(user, listed=True)[:MAX_JOBS]]

    return {"jobs": await asyncio.to_thread(newest)}


@router.get("/jobs/{job_id}")
async def job(user: User, state: AppState, job_id: str) -> JobShown:
    return await asyncio.to_thread(job_shown, state.library, user, job_id)


@router.post("/jobs/{job_id}/cancel", status_code=202)
async def cancel(user: User, state: AppState, job_id: str) -> dict[str, str]:
    await asyncio.to_thread(state.library.ingest.cancel, user, job_id)
    return {"id": job_id}
