# SPDX-License-Identifier: Apache-2.0
"""The pages of vhpc web, and the same as JSON below /api/."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from importlib import resources
from typing import Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vhpc_slurm import __version__
from vhpc_slurm.cli import output
from vhpc_slurm.cli.jobs import clusters, reportdata, reporthtml
from vhpc_slurm.cli.jobs.reportdata import JobReport
from vhpc_slurm.cli.web import overview
from vhpc_slurm.cli.web.asking import Answer, Asker
from vhpc_slurm.cli.web.gathering import Overview, Viewing
from vhpc_slurm.cli.web.guard import VIEWER, Access, Application, Guard
from vhpc_slurm.config import Config

JOB_FRESH_S = 3.0
VIEWERS = 256
"""Viewers whose read reports are kept."""
LATEST = 2**32
PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'"
"""Of a picture that is opened by itself: it has its style sheet inside, and no scripts run."""
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SYMBOLS = {"held": "●", "not taken": "○", "released": "✓", "not clean": "!"}


class Pages:
    """Answers requests that the guard let pass; belongs to the event loop."""

    def __init__(
        self, config: Config, asker: Asker, viewing: Callable[[Config, int | None], Viewing]
    ) -> None:
        """``viewing`` makes what asks vhpcd for one viewer."""
        self._config = config
        self._asker = asker
        self._make = viewing
        self._viewings: OrderedDict[int | None, Viewing] = OrderedDict()
        self._assets = {
            "page.css": _text("templates/page.css") + _text("web/assets/web.css"),
            "live.js": _text("web/assets/live.js"),
            "icon.svg": _text("web/assets/icon.svg"),
        }

    def application(self) -> Application:
        """The pages without a guard."""
        return Starlette(
            routes=[
                Route("/", self._first),
                Route("/job", self._jump),
                Route("/jobs/{job_id}", self._job),
                Route("/jobs/{job_id}/placement/{number:int}.svg", self._picture),
                Route("/clusters/{serial:int}", self._cluster),
                Route("/api/overview", self._api_overview),
                Route("/api/jobs/{job_id}", self._api_job),
                Route("/api/clusters/{serial:int}", self._api_cluster),
                Route("/assets/{name}", self._asset),
            ]
        )

    async def _first(self, request: Request) -> Response:
        answer = await self._overview(request)
        values = None if answer.value is None else overview.page(overview.document(answer.value))
        return _page("overview.html.j2", answer, base="", found=values, symbols=SYMBOLS, now=time.time())

    async def _api_overview(self, request: Request) -> Response:
        answer = await self._overview(request)
        return _json(answer, None if answer.value is None else overview.document(answer.value))

    async def _jump(self, request: Request) -> Response:
        """The form that names a job."""
        job_id = _job_id(request.query_params.get("id", ""))
        target = "./" if job_id is None else f"jobs/{job_id}"
        return Response(status_code=303, headers={"location": target})

    async def _job(self, request: Request) -> Response:
        job_id = _job_id(request.path_params["job_id"])
        if job_id is None:
            return PlainTextResponse("this is not the number of a job\n", 404)
        answer = await self._report(request, job_id)
        found = None if answer.value is None else answer.value[0]
        content = None if found is None else reporthtml.content(found)
        if content is not None:
            content["pictures"] = [
                (nodes, _image(f"{job_id}/placement/{number}.svg", nodes))
                for number, (nodes, _) in enumerate(content["pictures"])
            ]
        missing = answer.value is not None and found is None
        values = (content or {}) | {"job_id": job_id, "missing": missing, "known": content is not None}
        values["cluster"] = None if found is None else found.record.lease.cluster
        return _page("job.html.j2", answer, base="../", status=404 if missing else 200, **values)

    async def _api_job(self, request: Request) -> Response:
        job_id = _job_id(request.path_params["job_id"])
        answer = Answer((None,)) if job_id is None else await self._report(request, job_id)
        found = None if answer.value is None else answer.value[0]
        if answer.value is not None and found is None:
            return Response(
                b'{"problem":"vhpcd shows you no such job"}\n', 404, media_type="application/json"
            )
        return _json(answer, None if found is None else reportdata.document(found))

    async def _cluster(self, request: Request) -> Response:
        serial = request.path_params["serial"]
        answer, document = await self._members(request, serial)
        missing = answer.value is not None and document is None
        values = {"serial": serial, "found": document, "missing": missing, "rows": overview.MAX_ROWS}
        return _page(
            "cluster.html.j2",
            answer,
            base="../",
            status=404 if missing else 200,
            now=time.time(),
            node_list=output.node_list,
            **values,
        )

    async def _api_cluster(self, request: Request) -> Response:
        answer, document = await self._members(request, request.path_params["serial"])
        if answer.value is not None and document is None:
            return Response(
                b'{"problem":"vhpcd shows you no such cluster"}\n', 404, media_type="application/json"
            )
        return _json(answer, document)

    async def _members(self, request: Request, serial: int) -> tuple[Answer[Any], dict[str, Any] | None]:
        """A cluster with its members; None if vhpcd shows this viewer no such cluster."""
        viewer = request.scope[VIEWER]
        viewing = self._viewing(viewer)
        answer = await self._asker.ask(
            (viewer, "cluster", serial), lambda: viewing.cluster(serial), lambda _: JOB_FRESH_S
        )
        found = None if answer.value is None else answer.value[0]
        return answer, None if found is None else clusters.whole_document(*found)

    async def _picture(self, request: Request) -> Response:
        job_id, number = _job_id(request.path_params["job_id"]), request.path_params["number"]
        answer = Answer((None,)) if job_id is None else await self._report(request, job_id)
        found = None if answer.value is None else answer.value[0]
        drawn = [] if found is None else reporthtml.content(found)["pictures"]
        if number >= len(drawn):
            return PlainTextResponse("there is no such picture\n", 404)
        headers = {"content-security-policy": PICTURE_POLICY}
        return Response(str(drawn[number][1]), media_type="image/svg+xml", headers=headers)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(self._assets[name], media_type=TYPES[name.rpartition(".")[2]])

    async def _overview(self, request: Request) -> Answer[Overview]:
        viewer = request.scope[VIEWER]
        return await self._asker.ask(
            (viewer, "overview"), self._viewing(viewer).overview, lambda found: found.fresh_s
        )

    async def _report(self, request: Request, job_id: int) -> Answer[tuple[JobReport | None]]:
        viewer = request.scope[VIEWER]
        viewing = self._viewing(viewer)
        return await self._asker.ask(
            (viewer, "job", job_id), lambda: viewing.job(job_id), lambda _: JOB_FRESH_S
        )

    def _viewing(self, viewer: int | None) -> Viewing:
        found = self._viewings.get(viewer) or self._make(self._config, viewer)
        self._viewings[viewer] = found
        self._viewings.move_to_end(viewer)
        if len(self._viewings) > VIEWERS:
            self._viewings.popitem(last=False)
        return found


def guarded(config: Config, asker: Asker, access: Access) -> Guard:
    """All of vhpc web, for a server."""
    return Guard(Pages(config, asker, Viewing).application(), access)


def _job_id(text: str) -> int | None:
    """A job id; None if the text is no job id."""
    return (
        int(text)
        if text.isascii() and text.isdigit() and 0 < len(text) < 11 and 0 < int(text) < LATEST
        else None
    )


def _page(template: str, answer: Answer[Any], *, base: str, status: int = 200, **values: Any) -> Response:
    text = reporthtml.ENVIRONMENT.get_template(template).render(
        base=base,
        problem=answer.problem,
        age=output.span(answer.age_s),
        empty=answer.value is None,
        span=output.span,
        **{"version": __version__, **values},
    )
    return Response(text, status, media_type="text/html")


def _json(answer: Answer[Any], document: dict[str, Any] | None) -> Response:
    """The document with its age; 503 if vhpcd has never answered."""
    body = {"age_s": round(answer.age_s, 1), "problem": answer.problem or None, "data": document}
    status = 503 if document is None else 200
    return Response(msgspec.json.encode(body) + b"\n", status, media_type="application/json")


def _image(address: str, nodes: str) -> Markup:
    words = f"Picture of the guests on {nodes}; the table of guests says the same"
    return Markup('<img src="{}" alt="{}">').format(quote(address), words)


def _text(name: str) -> str:
    return resources.files("vhpc_slurm.cli").joinpath(name).read_text(encoding="utf-8")
