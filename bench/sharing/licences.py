"""Licences of weights: as the source of the weights names them, or as the user does, by SPDX's names."""

from collections.abc import Mapping
from typing import Any

# The Hub's names of licences that weights of ViTs have (docs/hub/repositories-licenses); others are `other`.
LICENCES = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "openrail", "gpl-3.0", "agpl-3.0"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}
UNKNOWN = "unknown"


def spdx_name(text: str, option: str) -> str:
    """A licence as SPDX spells it: `apache-2.0` is `Apache-2.0`. ValueError, with the `option`, for other names."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        raise ValueError(
            f"{option} {text}: SPDX knows no such licence; write a name of spdx.org/licenses, such as apache-2.0, or "
            "LicenseRef-NAME for one of your own"
        ) from None


def licence_of(facts: Mapping[str, Any], given: str) -> str:
    """The licence of an export; "" where it is unknown. ValueError where the source of the weights says another one.

    facts: of the export. given: what the user says; "": nothing.
    """
    source = str(facts.get("licence") or "")
    source = "" if source == UNKNOWN else source
    if source and given and source.lower() != given.lower():
        raise ValueError(f"--licence {given}: the source of these weights says {source}; leave the option out")
    return given or source


def hub_names(licence: str) -> dict[str, str]:
    """What the Hub's header says of a licence: `license`, and `license_name` of those that it does not know."""
    known = licence.lower() in LICENCES or not licence
    return {"license": licence.lower() or UNKNOWN} if known else {"license": "other", "license_name": licence}
