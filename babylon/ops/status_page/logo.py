"""The project's picture: of the status page, and of our blocks in Prefect's UI.

Prefect's client takes an address of ``http`` or ``https`` for a logo, and refuses a ``data:`` URI.
So the admin port serves the picture, without a key, to a browser that reaches Prefect's UI on
loopback too.
"""

from pathlib import Path

from fastapi import FastAPI, Response

PATH = "/logo.png"
_FILE = Path(__file__).parent / "templates" / "logo.png"


def add_logo(app: FastAPI) -> None:
    """Serve the picture: a PNG of 128 by 128 pixels."""
    picture = _FILE.read_bytes()
    headers = {"cache-control": "max-age=86400", "x-content-type-options": "nosniff"}

    async def logo() -> Response:
        return Response(picture, media_type="image/png", headers=headers)

    app.add_api_route(PATH, logo, methods=["GET"], include_in_schema=False)


def logo_url(admin_port: int) -> str:
    return f"http://127.0.0.1:{admin_port}{PATH}"
