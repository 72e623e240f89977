"""`create_app`: routes, error shapes and middleware around one engine.

The app has no lifespan of its own: a server that is to answer /health while the model loads must listen before it
is ready, and uvicorn opens its listener only after a lifespan has started. `lifecycle.py` starts, drains and stops.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server.auth import Auth, OriginGate, is_local
from server.bodies import BodyLimit
from server.dashboard.feed import Feed
from server.engine_port import Engine
from server.keys import KeyRing, read_clients
from server.metrics import Metrics
from server.metrics_vllm import VllmNames
from server.middleware import PhaseGate, RequestContext
from server.protocol import errors
from server.reload import Reloader
from server.routes import (
    admin,
    chat,
    completions,
    dashboard,
    embeddings,
    health,
    messages,
    models,
    openapi,
    responses,
    stored_responses,
    tokenize,
)
from server.routes.admin import ADMIN_PATHS
from server.routes.dashboard import EVENTS_PATH, PAGE_PATHS
from server.routes.health import OPERATOR_PATHS, package_version
from server.settings import Settings
from server.tracing import Tracing

OPEN_PATHS = ("/health",)  # what a supervisor asks, who has no key
QUIET_PATHS = (*OPERATOR_PATHS, *PAGE_PATHS, EVENTS_PATH)  # asked every few seconds, or open for hours: not traced

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    models.router,
    completions.router,
    chat.router,
    responses.router,
    stored_responses.router,
    messages.router,
    embeddings.router,
    tokenize.router,
    openapi.router,
    admin.router,
    dashboard.router,
)


def create_app(settings: Settings, engine: Engine, end: Callable[[], None] | None = None) -> FastAPI:
    """The ASGI app. `app.state` holds `settings`, `engine`, `metrics`, `routes`, `reloader`, `tracing` and `end`; the
    engine may be in any phase. end: begins the end of the process, as SIGTERM does; None: the app ends by other means.

    Raises StartError for a key file that cannot be used, and for traces without the extra that sends them."""
    ring = KeyRing(read_clients(settings.key_digests(), settings.api_key_file))
    reloader = Reloader(settings, ring)
    adapters = [module.name for module in settings.lora_modules]
    metrics = Metrics(settings.served_model_name, adapters)
    metrics.watch(lambda: engine.phase, lambda: engine.hung)
    metrics.watch_clients(lambda: ring.accounts)
    if settings.metrics_compat == "vllm":
        metrics.registry.register(VllmNames(metrics))
    engine.add_listener(metrics.observe_delivery)
    version, endpoint = package_version("pagemill"), settings.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing(endpoint, version, QUIET_PATHS)
    app = FastAPI(
        title="Pagemill",
        version=version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=_middleware(settings, engine, metrics, ring, tracing),
    )
    app.state.settings = settings
    app.state.engine = engine
    app.state.metrics = metrics
    app.state.has_keys = bool(ring)
    app.state.reloader = reloader
    app.state.end = end or (lambda: None)
    app.state.tracing = tracing
    routers = [router for router in ROUTERS if settings.status_page or router is not dashboard.router]
    if settings.status_page:
        app.state.feed = Feed(engine, metrics, settings.served_model_name, adapters)
    app.state.routes = [route for router in routers for route in router.routes]
    errors.install(app)
    for router in routers:
        app.include_router(router)
    return app


def _middleware(
    settings: Settings, engine: Engine, metrics: Metrics, ring: KeyRing, tracing: Tracing | None
) -> list[Middleware]:
    """Outermost first."""
    open_paths = OPEN_PATHS if settings.metrics_auth else (*OPEN_PATHS, "/metrics")
    page_paths = PAGE_PATHS if settings.status_page else ()
    any_phase = (*OPERATOR_PATHS, *ADMIN_PATHS, *page_paths, EVENTS_PATH)
    stack = [Middleware(RequestContext, metrics=metrics, tracing=tracing)]
    if settings.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "X-Pagemill-Ignored"],
            )
        )
    return [
        *stack,
        Middleware(OriginGate, allowed=settings.cors_origins, only_local=not ring and is_local(settings.host)),
        Middleware(Auth, ring=ring, open_paths=(*open_paths, *page_paths)),
        Middleware(PhaseGate, phase=lambda: engine.phase, open_paths=any_phase),
        Middleware(
            BodyLimit,
            max_bytes=settings.max_body_size,
            timeout_s=settings.client_timeout,
            num_logged=settings.max_log_len if settings.enable_log_requests else 0,
        ),
    ]
