// Starts the explorer on this controller's own contract. A token given to
// Authorize stays in memory and is gone with the page.
"use strict";
window.ui = SwaggerUIBundle({
  url: "../api/v1/openapi.json",
  dom_id: "#explorer",
  layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis],
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  filter: true,
  validatorUrl: null,
  persistAuthorization: false,
  defaultModelsExpandDepth: 0,
  requestSnippetsEnabled: true,
});
